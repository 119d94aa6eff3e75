// The live suite on runc.

import { live } from "./live.js";

live("runc");
