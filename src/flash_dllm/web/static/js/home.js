// The home page needs its theme button only.

import { startTheme } from "./theme.js";

startTheme();
