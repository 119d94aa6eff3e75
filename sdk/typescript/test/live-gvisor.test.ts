// The live suite on gvisor.

import { live } from "./live.js";

live("gvisor");
