// Filters built from the description of a gallery's attributes, in the service's JSON form:
// {"colour": {"in": ["red"]}, "price": {">=": 5, "<=": 20}, "sale": true}.

import { debounced, element } from "../shared/dom.js";
import { grouped, labelOf, valueText } from "../shared/format.js";

const OPEN_AT_FIRST = 2;
const SHOWN_OPTIONS = 8;
const FEW = 2; // fewer hidden options than this need no button
const TYPING_MS = 400;
const RESERVED = new Set(["and", "or", "not"]); // operators of the JSON form, not attributes

// An attribute keeps its entry after its last value was removed.
export const hasValues = ({ kind, values, minimum }) => kind === "number" ? minimum != null : values?.length !== 0;

function isUseful({ name, kind, values, minimum, maximum }) {
  if (RESERVED.has(name)) return false;
  if (kind === "boolean") return true;
  if (kind === "number") return minimum !== null && minimum !== undefined && minimum < maximum;
  const counts = values ?? [];
  return counts.length > 1 && counts.some(({ count }) => count > 1);
}

const chosenOf = (condition) => (Array.isArray(condition?.in) ? condition.in : []);

function checkbox({ value, count }, chosen, onToggle) {
  const box = element("input", { type: "checkbox", value, checked: chosen.includes(value) });
  box.addEventListener("change", () => onToggle(value, box.checked));
  const name = element("span", { className: "option-name", textContent: valueText(value) });
  const number = element("span", { className: "option-count", textContent: grouped(count) });
  return element("label", { className: "option" }, box, name, number);
}

// The count of a value, or null for a rare one: these are counted together as `other`.
function countOf({ values, other }, value) {
  return values.find((one) => one.value === value)?.count ?? (other > 0 ? null : 0);
}

function bar({ from, to, count }, most) {
  const span = from === to ? valueText(from) : `${valueText(from)} to ${valueText(to)}`;
  const made = element("span", { title: `${span}: ${grouped(count)}` });
  made.style.height = `${(100 * count) / most}%`;
  return made;
}

function showBars(chart, { bins, values }) {
  const bars = bins ?? values.map(({ value, count }) => ({ from: value, to: value, count }));
  const most = Math.max(...bars.map(({ count }) => count), 1);
  chart.hidden = bars.length < 2;
  chart.replaceChildren(...bars.map((one) => bar(one, most)));
}

// Updates the counts of one attribute in the existing elements, so that the focus stays.
function showCount(part, facet) {
  for (const option of part.querySelectorAll(".option")) {
    const count = countOf(facet, option.querySelector("input").value);
    option.classList.toggle("none", count === 0);
    option.querySelector(".option-count").textContent = count === null ? "" : grouped(count);
  }
  for (const choice of part.querySelectorAll(".choice")) {
    const word = choice.querySelector("input").value;
    if (word !== "any") choice.querySelector("span").dataset.count = countOf(facet, word === "yes");
  }
  const bars = part.querySelector(".bars");
  if (bars !== null) showBars(bars, facet);
}

// The options with a field to find one and a button that shows the rest, if there are many.
function optionList(name, options) {
  const list = element("div", { className: "options" }, ...options);
  let isOpen = options.length < SHOWN_OPTIONS + FEW;
  if (isOpen) return [list];
  const field = element("input", { type: "search", className: "option-find", placeholder: "Find a value" });
  field.ariaLabel = `Find a value of ${labelOf(name)}`;
  const more = element("button", { type: "button", className: "small", testid: "filter-more" });
  const show = () => {
    const wanted = field.value.trim().toLowerCase();
    options.forEach((option, index) => {
      const isListed = isOpen || index < SHOWN_OPTIONS || option.querySelector("input").checked;
      option.hidden = !(wanted ? option.textContent.toLowerCase().includes(wanted) : isListed);
    });
    more.hidden = isOpen || wanted !== "";
    more.textContent = `Show ${grouped(options.filter(({ hidden }) => hidden).length)} more`;
  };
  field.addEventListener("input", show);
  more.addEventListener("click", () => {
    const next = options.find(({ hidden }) => hidden);
    isOpen = true;
    show();
    next?.querySelector("input").focus();
  });
  show();
  return [field, list, more];
}

function textFilter({ name, values }, condition, change) {
  const chosen = [...chosenOf(condition)];
  const toggle = (value, on) => {
    if (on) chosen.push(value);
    else chosen.splice(chosen.indexOf(value), 1);
    change(chosen.length > 0 ? { in: [...chosen] } : null);
  };
  const unlisted = chosen.filter((value) => !values.some((one) => one.value === value));
  const all = [...unlisted.map((value) => ({ value, count: 0 })), ...values];
  return optionList(name, all.map((value) => checkbox(value, chosen, toggle)));
}

function limitField(name, sign, word, bound, condition, onInput) {
  const field = element("input", {
    type: "number",
    step: "any",
    inputMode: "decimal",
    placeholder: valueText(bound),
    value: condition?.[sign] ?? "",
  });
  field.ariaLabel = `${labelOf(name)}, ${word}`;
  field.dataset.testid = `filter-${word}`;
  field.addEventListener("input", onInput);
  return field;
}

function numberFilter({ name, minimum, maximum }, condition, change) {
  const read = debounced(() => {
    const limits = {};
    if (low.value !== "") limits[">="] = Number(low.value);
    if (high.value !== "") limits["<="] = Number(high.value);
    change(Object.keys(limits).length > 0 ? limits : null);
  }, TYPING_MS);
  const low = limitField(name, ">=", "from", minimum, condition, read);
  const high = limitField(name, "<=", "to", maximum, condition, read);
  const bars = element("div", { className: "bars", role: "img", ariaLabel: `Number of items by ${labelOf(name)}`, hidden: true, testid: "filter-bars" });
  return [bars, element("div", { className: "limits" }, low, element("span", { textContent: "to" }), high)];
}

function boolFilter({ name }, condition, change) {
  const choices = [["any", null], ["yes", true], ["no", false]];
  const options = choices.map(([word, value]) => {
    const radio = element("input", { type: "radio", name: `filter ${name}`, value: word });
    radio.checked = (condition ?? null) === value;
    radio.addEventListener("change", () => change(value));
    return element("label", { className: "choice" }, radio, element("span", { textContent: word }));
  });
  return [element("div", { className: "choices" }, ...options)];
}

function fieldOf(attribute, condition, change) {
  if (attribute.kind === "boolean") return boolFilter(attribute, condition, change);
  return (attribute.kind === "number" ? numberFilter : textFilter)(attribute, condition, change);
}

// The panel of one gallery's filters. onChange(filter) is called with the whole filter. Conditions that
// the panel cannot show are kept.
export class FilterPanel {
  constructor(container, onChange) {
    Object.assign(this, { container, onChange, attributes: [], filter: {}, counts: {} });
  }

  names() {
    return this.attributes.filter(isUseful).map(({ name }) => name);
  }

  // Shows new counts of values. Attributes without new counts keep theirs.
  count(counts) {
    this.counts = counts;
    for (const part of this.container.children) {
      if (part.dataset.name in counts) showCount(part, counts[part.dataset.name]);
    }
  }

  // Rebuilds the panel only if the change came from elsewhere, so that the focus stays.
  show(attributes, filter) {
    const isSame = JSON.stringify(filter) === JSON.stringify(this.filter) &&
      (attributes === this.attributes || this.container.contains(document.activeElement));
    if (attributes !== this.attributes) this.counts = {};
    Object.assign(this, { attributes, filter });
    if (isSame) return;
    const opened = new Map(
      [...this.container.querySelectorAll("details")].map(({ dataset, open }) => [dataset.name, open]),
    );
    const useful = attributes.filter(isUseful);
    this.container.hidden = useful.length === 0;
    this.container.replaceChildren(
      ...useful.map((attribute, index) => this.#part(attribute, index < OPEN_AT_FIRST, opened)),
    );
    this.count(this.counts);
  }

  #part(attribute, isEarly, opened) {
    const { name } = attribute;
    const change = (condition) => {
      const others = without(this.filter, name);
      this.filter = condition === null ? others : { ...others, [name]: condition };
      this.onChange(this.filter);
    };
    const legend = element("legend", { className: "sr-only", textContent: labelOf(name) });
    const fields = fieldOf(attribute, this.filter[name], change);
    const made = element(
      "details",
      { className: "filter", open: opened.get(name) ?? (isEarly || name in this.filter) },
      element("summary", { textContent: labelOf(name) }),
      element("fieldset", {}, legend, ...fields),
    );
    Object.assign(made.dataset, { name, testid: "filter" });
    return made;
  }
}

const without = (filter, name) => {
  const { [name]: _, ...others } = filter;
  return others;
};

function limitsText(name, condition) {
  const [low, high] = [condition[">="], condition["<="]];
  if (low === undefined) return `${labelOf(name)} up to ${valueText(high)}`;
  if (high === undefined) return `${labelOf(name)} from ${valueText(low)}`;
  return `${labelOf(name)} ${valueText(low)} – ${valueText(high)}`;
}

const isLimits = (condition) =>
  Object.keys(condition).length > 0 && Object.keys(condition).every((sign) => [">=", "<="].includes(sign));

// Returns [{text, filter}], one chip for each value. `filter` is the filter without that value.
export function filterChips(filter) {
  return Object.entries(filter).flatMap(([name, condition]) => {
    const chosen = chosenOf(condition);
    if (chosen.length > 0) {
      return chosen.map((value) => {
        const rest = chosen.filter((other) => other !== value);
        const others = rest.length > 0 ? { ...filter, [name]: { in: rest } } : without(filter, name);
        return { text: `${labelOf(name)}: ${valueText(value)}`, filter: others };
      });
    }
    const isValue = condition === null || typeof condition !== "object";
    if (isValue) return [{ text: `${labelOf(name)}: ${valueText(condition)}`, filter: without(filter, name) }];
    const text = isLimits(condition) ? limitsText(name, condition) : `${labelOf(name)} ${JSON.stringify(condition)}`;
    return [{ text, filter: without(filter, name) }];
  });
}
