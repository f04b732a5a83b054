"""Files of the static folder that are made from others: ``python -m flash_dllm.web.build``.

The pages themselves need no build. Made are the numbers of the toys, the bundled copy of the results and the player
as one file, into which logs are put.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import static_folder
from .player import TEMPLATE

IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.M)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) )", re.M)
NAME = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)", re.M)


def bundle(entry: str, folder: Path | None = None) -> str:
    """ES modules as one script: each module a function that returns its exports, in order of need.

    Handles what the modules use: ``import { a, b } from "./x.js"`` and exported declarations.

    Raises:
        ValueError: an import or export in another form.
    """
    folder = folder or static_folder() / "js"
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        done[name] = ""
        text = (folder / name).read_text(encoding="utf-8")
        for _, other in IMPORT.findall(text):
            add(other)
        exports = NAME.findall(text)
        body = IMPORT.sub(lambda m: f"const {{{m[1]}}} = {_variable(m[2])};\n", text)
        body = EXPORT.sub("", body)
        if re.search(r"^(?:import|export)\b", body, re.M):
            raise ValueError(f"{name}: an import or export that the bundle does not know")
        done.pop(name)
        done[name] = (
            f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();\n"
        )

    add(entry)
    return "".join(done.values())


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def player_template() -> str:
    """The player as one page without logs."""
    folder = static_folder()
    style = (folder / "css" / "site.css").read_text(encoding="utf-8")
    script = bundle("standalone.js").replace("</script", "<\\/script")
    return TEMPLATE.replace("@STYLE@", style).replace("@SCRIPT@", script)


def made_files() -> dict[Path, str]:
    """Every made file and its text."""
    from .export import toy_json
    from .results import checkout_results, index_of

    folder = static_folder()
    files = {folder / "data" / "toys.json": toy_json(), folder / "player-file.html": player_template()}
    results = checkout_results()
    if results is not None:
        text = json.dumps(index_of(results), ensure_ascii=False, separators=(",", ":"))
        files[folder / "data" / "results.json"] = text + "\n"
    return files


if __name__ == "__main__":
    for path, text in made_files().items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text.encode())} bytes")
