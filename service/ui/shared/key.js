// The API key of this tab. It is asked for only after a refusal, and removed when the tab closes.

import { stored } from "./storage.js";

const kept = stored("sessionStorage", "kinlens.key");

export const getKey = () => kept.get() || "";

export const setKey = (text) => kept.set(text.trim() || null);
