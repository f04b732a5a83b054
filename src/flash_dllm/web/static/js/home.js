// The home page needs its theme button only.

import { started, startTheme } from "./theme.js";

startTheme();
started();
