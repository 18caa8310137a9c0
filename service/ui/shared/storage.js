// The browser's storage. It may be blocked, full, or contain data of another version.

function areaNamed(name) {
  try {
    return globalThis[name]; // reading the property throws where storage is blocked
  } catch {
    return null;
  }
}

// One key of `localStorage` or `sessionStorage`. A value that the storage refuses lasts as long as the page.
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
    // Returns whether the value outlives the page. null removes it.
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
