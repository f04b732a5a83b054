"""Runs the application in a process: loads the model, listens, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from flash_dllm.errors import FlashDLLMError
from flash_dllm.llm import LLM, max_slots, method_of
from flash_dllm.loading import load
from flash_dllm.serve.app import Limits, create_app
from flash_dllm.serve.args import ServeArgs
from flash_dllm.serve.args import methods as methods_of
from flash_dllm.serve.service import Service
from flash_dllm.serve.tracing import Spans

LINGER = 30
"""Seconds that clients get after a drain to read what is there for them."""
SWITCH = 0.001
"""Seconds after which a Python thread that wants to run may take over. The engine thread is never idle under load, and
each turn of the event loop would wait for Python's usual 5 ms: 200 turns a second for all clients together."""
log = logging.getLogger("flash_dllm.serve")


def build_service(args: ServeArgs) -> Service:
    """Load the model once and put an engine a method over its weights; their slots add up to ``max_num_seqs``.

    Raises:
        FlashDLLMError: the model, a method or an option is wrong.
    """
    wanted = methods_of(args)
    first = next(iter(wanted.values()))
    loaded = load(first)
    methods = [method_of(loaded, engine) for engine in wanted.values()]
    slots = max_slots(loaded, first.model_copy(update={"max_num_seqs": args.max_num_seqs}), *methods)
    if slots < len(wanted):
        raise FlashDLLMError(f"max_num_seqs={slots} slots for {len(wanted)} methods; each needs at least one")
    llms: dict[str, LLM] = {}
    for index, ((name, engine), method) in enumerate(zip(wanted.items(), methods, strict=True)):
        share = slots // len(wanted) + (index < slots % len(wanted))
        llm = LLM.from_args(engine.model_copy(update={"max_num_seqs": share}), loaded, method)
        llm.warm_up(progress=True)
        llms[name or llm.method.name] = llm
    return Service(
        llms, models=args.served_model_name, max_queue=args.max_queue, timeout=args.request_timeout
    )


class Server(uvicorn.Server):
    """uvicorn that goes on answering after SIGTERM until what runs is finished, then ends with exit code 0.

    uvicorn itself would stop listening at once, so a client could not be told 503, and end by the signal.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout: float) -> None:
        super().__init__(config)
        self._service, self._drain_timeout = service, drain_timeout
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        names, methods = ", ".join(self._service.models), ", ".join(self._service.llms)
        for door in sockets or ():
            host, port = door.getsockname()[:2]
            log.info(
                "serving %s with %s on http://%s:%d",
                names,
                methods,
                f"[{host}]" if ":" in host else host,
                port,
            )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if sys.platform == "win32":
            # No handlers on the event loop there; uvicorn's own end the server without a drain.
            with super().capture_signals():
                yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._heard, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _heard(self, number: signal.Signals) -> None:
        if self._draining is not None:
            log.warning("second signal: ending at once")
            self.should_exit = self.force_exit = True
            return
        log.info("%s: draining; %d answers to finish", number.name, self._service.unfinished)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        self._service.drain()
        idle = await asyncio.get_running_loop().run_in_executor(
            None, self._service.wait_idle, self._drain_timeout
        )
        if not idle:
            log.warning("%d answers were not finished in time", self._service.unfinished)
            self._service.close()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        FlashDLLMError: the address cannot be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as exc:
        raise FlashDLLMError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    return made


def run(args: ServeArgs) -> None:
    """Serve until a signal.

    Raises:
        FlashDLLMError: the model, a method, an option or the address is wrong.
    """
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sys.setswitchinterval(SWITCH)
    spans = Spans.from_environment() if args.otel else Spans(None)
    with listen(args.host, args.port) as door:
        service = build_service(args)
        app = create_app(
            service,
            api_key=args.api_key,
            limits=Limits(args.max_body, args.max_answers),
            log_prompts=args.log_prompts,
            spans=spans,
        )
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=LINGER
        )
        try:
            Server(config, service, args.drain_timeout).run(sockets=[door])
        finally:
            service.llms[service.default].close()
