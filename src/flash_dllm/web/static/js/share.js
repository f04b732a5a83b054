// Players in one file: logs travel compressed inside the page.

import { parseLog } from "./log.js";

const MARK = '<script id="logs" type="application/json">[]</script>';

async function squeeze(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let binary = "";
  for (let at = 0; at < bytes.length; at += 32768) binary += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(binary);
}

async function unsqueeze(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** The text of a player file that holds `logs`. */
export async function playerFile(logs) {
  const answer = await fetch("player-file.html");
  if (!answer.ok) throw new Error("the server has no player-file.html");
  const page = await answer.text();
  const packed = await Promise.all(logs.map(async (log) => ({ name: log.name, gzip: await squeeze(log.lines) })));
  if (!page.includes(MARK)) throw new Error("player-file.html has no place for logs");
  return page.replace(MARK, () => MARK.replace("[]", () => JSON.stringify(packed).replaceAll("<", "\\u003c")));
}

/** Save text as a file. */
export function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The logs inside this page. */
export async function embedded() {
  const packed = JSON.parse(document.getElementById("logs").textContent);
  return Promise.all(packed.map(async ({ name, gzip }) => parseLog(await unsqueeze(gzip), name)));
}
