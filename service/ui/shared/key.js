// The API key of this tab: typed only when the service asks for one, forgotten with the tab.

import { stored } from "/ui/shared/storage.js";

const kept = stored("sessionStorage", "kinlens.key");

export const getKey = () => kept.get() || "";

export const setKey = (text) => kept.set(text.trim() || null);
