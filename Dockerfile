# flash-dllm serve on an NVIDIA GPU. Build: docker build -t flash-dllm .
# Run: docker run --gpus all -p 8000:8000 flash-dllm serve GSAI-ML/LLaDA-8B-Instruct --host 0.0.0.0
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04

# Triton compiles a small launcher with the C compiler.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/flash-dllm/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
RUN python3 -m venv /opt/flash-dllm

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[serve,otel]" && rm -rf /src

# The K/V cache and the weights live on the GPU; the process needs no rights.
RUN useradd --create-home --uid 10001 server && mkdir -p /models && chown server /models
USER server
WORKDIR /home/server
VOLUME /models
EXPOSE 8000

# SIGTERM drains: give `docker stop` the time that running requests need.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["flash-dllm"]
CMD ["serve", "--host", "0.0.0.0"]
