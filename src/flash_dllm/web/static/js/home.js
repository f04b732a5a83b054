// The home page needs its theme button only.

import { startTheme } from "./theme.js";

startTheme();
// As on the other pages: the script has started.
window.toy = {};
