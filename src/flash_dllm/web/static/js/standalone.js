// A player file: the logs are inside the page.

import { byId } from "./dom.js";
import { Player } from "./player.js";
import { embedded } from "./share.js";
import { started, startTheme } from "./theme.js";

async function start() {
  startTheme();
  try {
    const logs = await embedded();
    const player = new Player(byId("player"));
    player.show(logs);
    started({ player });
  } catch (error) {
    byId("error").textContent = `This file cannot be played: ${error.message}`;
    byId("error").hidden = false;
  }
}

start();
