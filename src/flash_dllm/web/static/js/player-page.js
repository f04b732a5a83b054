// The player's page: logs come from a file, by drag and drop, or are the bundled example.

import { byId } from "./dom.js";
import { LogError, parseLog } from "./log.js";
import { Player } from "./player.js";
import { playerFile, save } from "./share.js";
import { started, startTheme } from "./theme.js";

const MOST = 2;
let logs = [];
let player;

function complain(error) {
  if (!(error instanceof LogError)) console.warn(error);
  byId("error").textContent = error.message;
  byId("error").hidden = false;
}

/** Add logs; the latest two are shown. */
async function open(files) {
  byId("error").hidden = true;
  try {
    const read = [];
    for (const file of files) read.push(parseLog(await file.text(), file.name));
    logs = [...logs, ...read].slice(-MOST);
    present();
  } catch (error) {
    complain(error);
  }
}

function present() {
  player.show(logs);
  byId("clear").hidden = byId("export").hidden = logs.length === 0;
  byId("names").textContent = logs.length ? `Open: ${logs.map((log) => log.name).join(" and ")}.` : "";
}

async function example() {
  byId("error").hidden = true;
  try {
    const names = ["threshold.jsonl", "verify.jsonl"];
    const texts = await Promise.all(names.map(async (name) => (await fetch(`data/${name}`)).text()));
    logs = texts.map((text, i) => parseLog(text, names[i]));
    present();
  } catch (error) {
    complain(error);
  }
}

function start() {
  startTheme();
  player = new Player(byId("player"));
  byId("file").addEventListener("change", (event) => {
    open([...event.target.files]);
    event.target.value = "";
  });
  byId("example").addEventListener("click", example);
  byId("clear").addEventListener("click", () => {
    logs = [];
    present();
  });
  byId("export").addEventListener("click", async () => {
    try {
      save("player.html", await playerFile(logs));
    } catch (error) {
      complain(error);
    }
  });
  const drop = byId("drop");
  for (const kind of ["dragenter", "dragover"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  document.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    open([...event.dataTransfer.files]);
  });
  started({ player, logs: () => logs });
}

start();
