// The browser's storage, which may be blocked, full or hold what another version wrote.

function areaNamed(name) {
  try {
    return globalThis[name]; // reading the property throws where storage is blocked
  } catch {
    return null;
  }
}

// One key of `localStorage` or `sessionStorage`. What the storage refuses lasts as long as the page.
export function stored(areaName, key) {
  const area = areaNamed(areaName);
  let memory = null;
  return {
    get() {
      try {
        return memory ?? area?.getItem(key) ?? null;
      } catch {
        return memory;
      }
    },
    // Whether it will outlive the page; null removes it.
    set(text) {
      memory = null;
      try {
        if (text === null) area.removeItem(key);
        else area.setItem(key, text);
        return true;
      } catch {
        memory = text;
        return false;
      }
    },
  };
}
