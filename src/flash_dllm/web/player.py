"""Event logs as one HTML file that opens offline."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from flash_dllm.errors import FlashDLLMError
from flash_dllm.trace import read_trace

from . import static_folder

MOST = 2
MARK = '<script id="logs" type="application/json">[]</script>'
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>Recorded decoding | Flash-dLLM</title>
<link rel="icon" href="data:,">
<style>
@STYLE@</style>
</head>
<body>
<header class="top"><div><span class="brand">Flash-dLLM player</span>
<button id="theme" type="button" class="small">Theme: auto</button></div></header>
<main id="main">
<h1>Recorded decoding</h1>
<p class="error" id="error" role="alert" hidden></p>
<div id="player"></div>
</main>
<script id="logs" type="application/json">[]</script>
<script>
@SCRIPT@</script>
</body>
</html>
"""


class ExportError(FlashDLLMError):
    """Logs that cannot go into one file."""


def player_file(logs: Sequence[Path]) -> str:
    """A page that plays one log, or two side by side.

    Raises:
        TraceError: a log is broken; the message names file and line.
        ExportError: no log, or more than two.
    """
    if not 1 <= len(logs) <= MOST:
        raise ExportError(f"{len(logs)} logs: a player shows one, or two as a race")
    packed = []
    for path in logs:
        read_trace(path)
        data = gzip.compress(path.read_bytes(), mtime=0)
        packed.append({"name": path.name, "gzip": base64.b64encode(data).decode("ascii")})
    page = (static_folder() / "player-file.html").read_text(encoding="utf-8")
    if MARK not in page:
        raise ExportError("player-file.html has no place for logs")
    # A file name may hold anything; nothing in it may end the script.
    inside = json.dumps(packed).replace("<", "\\u003c")
    return page.replace(MARK, MARK.replace("[]", inside))
