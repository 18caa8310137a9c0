// Numbers and names as text for people, numbers in the language of the browser.

// undefined, which means the default, if the tag of the browser is not valid.
export const LANGUAGE = (() => {
  try {
    return Intl.getCanonicalLocales(navigator.language)[0];
  } catch {
    return undefined;
  }
})();

// A count: digits in groups.
export const grouped = (n) => n.toLocaleString(LANGUAGE);

export const plural = (n, noun) => `${grouped(n)} ${noun}${n === 1 ? "" : "s"}`;

export const milliseconds = (value) =>
  value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;

export const capitalized = (word) => word.slice(0, 1).toUpperCase() + word.slice(1);

// The name of an attribute as a label: "unit_price" becomes "Unit price".
export const labelOf = (name) => capitalized(name.replaceAll(/[_-]+/g, " "));

// Never 0 % or 100 %: a calibrated probability is neither.
export function percent(probability) {
  if (probability < 0.01) return "<1%";
  if (probability > 0.99) return ">99%";
  return `${Math.round(probability * 100)}%`;
}

const SHOWN_KEYS = 3;

// The first keys, and how many more there are.
export function someOf(keys) {
  const more = keys.length - SHOWN_KEYS;
  return keys.slice(0, SHOWN_KEYS).join(", ") + (more > 0 ? ` and ${grouped(more)} more` : "");
}

export function splitKey(key) {
  const cut = key.lastIndexOf("/") + 1;
  return { folder: key.slice(0, Math.max(cut - 1, 0)).replaceAll("/", " / "), name: key.slice(cut) };
}

export function valueText(value) {
  if (Array.isArray(value)) return value.map(valueText).join(", ");
  if (value === true) return "yes";
  if (value === false) return "no";
  return typeof value === "number" && !Number.isInteger(value) ? decimalText(value) : String(value);
}

// A number as it was written, without groups of digits: it may be a code. 0.1 + 0.2 is 0.3, and what
// was stored in 32 bits has the digits of 32 bits.
function decimalText(value) {
  const short = Number(value.toPrecision(7));
  const isSingle = Math.fround(value) === value && Math.fround(short) === value;
  return (isSingle ? short : value).toLocaleString(LANGUAGE, { useGrouping: false, maximumSignificantDigits: 15 });
}

// The value of an attribute as text. A price gets the `currency` of its item, if it has one.
export function attributeText(name, value, { currency } = {}) {
  if (!/price$/i.test(name) || typeof value !== "number" || typeof currency !== "string") return valueText(value);
  try {
    return value.toLocaleString(LANGUAGE, { style: "currency", currency });
  } catch {
    return `${valueText(value)} ${currency}`; // not an ISO 4217 code
  }
}

const MINUTE_MS = 60_000;

export function ago(time_ms, now_ms = Date.now()) {
  const minutes = Math.round((now_ms - time_ms) / MINUTE_MS);
  if (minutes < 1) return "just now";
  if (minutes < 60) return `${plural(minutes, "minute")} ago`;
  if (minutes < 60 * 24) return `${plural(Math.round(minutes / 60), "hour")} ago`;
  return new Date(time_ms).toLocaleDateString();
}
