"""``flash-dllm serve --replicas N``: the server's application on Ray Serve, as often as it is needed."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from typing import Any

from flash_dllm.scale.extras import ScaleError, need
from flash_dllm.scale.front import EngineReplica, Front
from flash_dllm.scale.ray_batch import RayArgs, cause_of, connect
from flash_dllm.scale.replica_args import ReplicaArgs
from flash_dllm.serve.args import ServeArgs
from flash_dllm.serve.args import methods as methods_of

log = logging.getLogger("flash_dllm.scale")
NAME = "flash-dllm"
"""The application's name in Ray Serve."""
ENGINES_A_FRONT = 16
MOST_SLOTS = 32
"""What an engine takes at most where ``max_num_seqs`` does not say."""
CHECK_SECONDS = 5.0


def check(args: ServeArgs) -> None:
    """Refuse what replicas cannot do, before anything is started.

    Raises:
        ScaleError: an option of one server that several do not have.
    """
    if args.tensor_parallel_size > 1:
        raise ScaleError(
            f"tensor_parallel_size={args.tensor_parallel_size} with replicas: a replica is one process; run a "
            "tensor parallel server each and balance between them"
        )
    if args.otel:
        raise ScaleError("otel with replicas: Ray Serve traces requests itself")
    methods_of(args)


def application(args: ServeArgs, replicas: ReplicaArgs, on_gpu: bool) -> Any:
    """The application for ``serve.run``: a front over engines, one a GPU or one a CPU core."""
    serve = need("ray.serve", "--replicas", "ray")
    slots = args.max_num_seqs or MOST_SLOTS
    scaling: dict[str, Any] = {"num_replicas": replicas.replicas}
    if replicas.max_replicas is not None:
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas.replicas, "initial_replicas": replicas.replicas,
                "max_replicas": replicas.max_replicas,
                "target_ongoing_requests": replicas.target_ongoing_requests or args.max_num_seqs or 8,
            }
        }  # fmt: skip
    engines = serve.deployment(
        EngineReplica,
        name="engine",
        # The engine's own queue is what refuses requests, with 429; Ray Serve must not hold them back before.
        max_ongoing_requests=slots + args.max_queue + 64,
        max_constructor_retry_count=1,
        health_check_period_s=CHECK_SECONDS,
        health_check_timeout_s=60.0,
        graceful_shutdown_timeout_s=args.drain_timeout,
        ray_actor_options={"num_gpus": 1} if on_gpu else {"num_cpus": 1},
        **scaling,
    ).bind(args.model_dump(mode="json"))
    most = replicas.max_replicas or replicas.replicas or 1
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=-(-most // ENGINES_A_FRONT),
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=args.drain_timeout,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(engines, args.max_body)


def deploy(args: ServeArgs, replicas: ReplicaArgs) -> int:
    """Start the application on the connected cluster; returns its port.

    Raises:
        ScaleError: the cluster has too few GPUs, or a replica cannot be started.
    """
    ray, serve = need("ray", "--replicas", "ray"), need("ray.serve", "--replicas", "ray")
    check(args)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    on_gpu = args.device != "cpu" and gpus > 0
    if on_gpu and (replicas.replicas or 1) > gpus:
        raise ScaleError(f"replicas={replicas.replicas}: the cluster has {gpus} GPUs, a replica needs one")
    port = args.port or _free_port(args.host)
    # One machine needs one door; on several, whatever balances between machines finds one on each.
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    serve.start(
        proxy_location="EveryNode" if nodes > 1 else "HeadOnly",
        http_options={"host": args.host, "port": port},
    )
    _check_port(port)
    try:
        serve.run(application(args, replicas, on_gpu), name=NAME, route_prefix="/")
    except RuntimeError as exc:
        why = _why(serve, exc)
        serve.delete(NAME)
        raise ScaleError(f"a replica cannot be started: {why}") from exc
    return port


def _why(serve: Any, exc: RuntimeError) -> str:
    """What the replica itself said; the error of the application only says that there was one."""
    there = serve.status().applications.get(NAME)
    said = [] if there is None else [d.message for d in there.deployments.values() if "Error" in d.message]
    return cause_of(RuntimeError(said[0])) if said else cause_of(exc)


def _check_port(port: int) -> None:
    """Ray Serve has one address a cluster; where it runs already, it keeps the one it has.

    Raises:
        ScaleError: another one.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    there = client.http_config.port if client is not None else port
    if there != port:
        raise ScaleError(f"port={port}: this cluster's Ray Serve already listens on {there}")


def run(args: ServeArgs, replicas: ReplicaArgs) -> None:
    """Serve until SIGTERM or SIGINT; then running requests are finished.

    Raises:
        ScaleError: see :func:`deploy`.
    """
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    ray, serve = need("ray", "--replicas", "ray"), need("ray.serve", "--replicas", "ray")
    need("fastapi", "serve", "serve")
    check(args)
    began = not ray.is_initialized()
    if began:
        connect(ray, RayArgs(address=replicas.ray_address))
    over = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: over.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        port = deploy(args, replicas)
        log.info("serving %d replicas on http://%s:%d", replicas.replicas or 1, args.host, port)
        over.wait()
        log.info("draining: running requests are finished")
        serve.delete(NAME)
    finally:
        if began:
            ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port(host: str) -> int:
    with socket.socket() as door:
        door.bind((host, 0))
        return int(door.getsockname()[1])
