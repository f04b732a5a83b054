"""``flash-dllm explain``: the pages that show how it works, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flash_dllm.cli.fields import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="The playground needs a model: flash-dllm serve shows the same pages with one.")
def explain(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free port")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open a browser")] = True,
    results: Annotated[
        Path | None,
        typer.Option(
            help="folder of result files; default: benchmarks/results of a checkout, else the bundled copy"
        ),
    ] = None,
    export_data: Annotated[
        Path | None,
        typer.Option(help="write the numbers of the toys as JSON, - for stdout, and stop"),
    ] = None,
) -> None:
    """Show the pages: cache toy, verify toy, player for event logs, playground, results."""
    if export_data is not None:
        _export(export_data)
        return
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: from 0 to 65535")
    _serve(host, port, browser, results)


def _export(target: Path) -> None:
    from flash_dllm.web.export import toy_json

    text = toy_json()
    if str(target) == "-":
        typer.echo(text, nl=False)
    else:
        target.write_text(text, encoding="utf-8")


def _serve(host: str, port: int, browser: bool, results: Path | None) -> None:
    from flash_dllm.web.results import checkout_results, index_of
    from flash_dllm.web.server import page_server

    if results is not None and not results.is_dir():
        raise UsageError(f"--results {results}: not a folder")
    folder = results or checkout_results()
    made = {} if folder is None else {"/data/results.json": lambda: index_of(folder)}
    try:
        server = page_server(host, port, made)
    except OSError as exc:
        raise UsageError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    url = f"http://{host}:{server.server_address[1]}/"
    typer.echo(f"{url}  (Ctrl-C ends it)")
    if browser:
        import webbrowser

        webbrowser.open(url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
