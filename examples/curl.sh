#!/usr/bin/env bash
# flash-dllm serve with curl.   bash examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"
ask() {
  curl --silent --show-error --fail-with-body --no-buffer "$url$1" \
    -H "Authorization: Bearer ${FLASH_DLLM_API_KEY:-none}" "${@:2}"
  echo
}
json=(-H "Content-Type: application/json")

ask /health
ask /v1/models
model=$(ask /v1/models | grep -o '"id": *"[^"]*"' | head -1 | sed 's/.*"\([^"]*\)"$/\1/')

ask /v1/chat/completions "${json[@]}" -d '{
  "model": "'"$model"'", "max_tokens": 32,
  "messages": [{"role": "user", "content": "What is 12 + 7?"}],
  "diffusion": {"epsilon": 0.8}
}'

# Server-sent events.
ask /v1/chat/completions "${json[@]}" -d '{
  "model": "'"$model"'", "max_tokens": 32, "stream": true, "stream_options": {"include_usage": true},
  "messages": [{"role": "user", "content": "What is 12 + 7?"}]
}'

# Infilling, with the log confidence of each token.
ask /v1/completions "${json[@]}" -d '{
  "model": "'"$model"'", "prompt": "Karl has a purple ring. The ring of Karl is", "suffix": ".", "max_tokens": 2,
  "logprobs": 0
}'

ask /metrics | grep '^flash_dllm_requests_total'
