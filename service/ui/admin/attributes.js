// The attributes of an item as rows of name, kind and value, or as JSON.

import { parsed } from "../shared/api.js";
import { element, icon, optionsOf, smallButton } from "../shared/dom.js";

const KINDS = [["text", "text"], ["number", "number"], ["boolean", "yes or no"]];
const WORDS = { "add-row": "Add an attribute", json: "Edit as JSON", rows: "Edit as a list" };

export const kindOf = (value) => ({ number: "number", bigint: "number", boolean: "boolean" })[typeof value] ?? "text";

function checkedObject(text) {
  let found;
  try {
    found = parsed(text || "{}");
  } catch (error) {
    throw new RangeError(`This must be valid JSON: ${error.message}.`);
  }
  if (found === null || typeof found !== "object" || Array.isArray(found)) {
    throw new RangeError('Write one object, such as {"colour": "red", "price": 5}.');
  }
  const isOne = (value) => ["string", "number", "bigint", "boolean"].includes(typeof value);
  const wrong = Object.entries(found).find(([, value]) => !(Array.isArray(value) ? value.every(isOne) : isOne(value)));
  if (wrong) throw new RangeError(`${wrong[0]} must be a string, a number, true or false, or a list of these.`);
  return found;
}

// The fields of a row cannot show these: several values, line breaks, and spaces around a name.
const needsJson = (attributes) =>
  Object.entries(attributes).some(([name, value]) => name !== name.trim() || Array.isArray(value) || /[\r\n]/.test(value));

function valueField(kind, value) {
  if (kind === "boolean") {
    const field = element("select", {}, ...optionsOf([["true", "yes"], ["false", "no"]]));
    field.value = String(value === true || value === "true");
    return field;
  }
  const field = element("input", { type: kind === "number" ? "number" : "text", autocomplete: "off" });
  if (kind === "number") field.step = "any";
  field.value = kind === "number" && !Number.isFinite(Number(value)) ? "" : String(value ?? "");
  return field;
}

function readValue(name, kind, text) {
  if (kind === "boolean") return text === "true";
  if (kind === "text") return text;
  if (text.trim() === "" || !Number.isFinite(Number(text))) throw new RangeError(`${name} must be a number.`);
  return /^\d+$/.test(text) && !Number.isSafeInteger(Number(text)) ? BigInt(text) : Number(text);
}

let editors = 0;

// An editor in `container`. `known`, the gallery's attributes, suggests names and kinds.
export class AttributeEditor {
  constructor(container) {
    editors += 1;
    this.names = element("datalist", { id: `attribute-names-${editors}` });
    this.rows = element("ul", { className: "attribute-rows" });
    this.text = element("textarea", { rows: 6, spellcheck: false, ariaLabel: "Attributes as JSON", testid: "attributes-text" });
    this.error = element("p", { className: "field-error", role: "alert" });
    this.add = smallButton(WORDS["add-row"], { testid: "attributes-add-row" }, () => this.#addRow("", "", true));
    this.turn = smallButton(WORDS.json, { testid: "attributes-json" }, () => this.#turn());
    const buttons = element("div", { className: "attribute-buttons" }, this.add, this.turn);
    container.replaceChildren(this.names, this.rows, this.text, this.error, buttons);
    this.show({}, []);
  }

  show(attributes, known = []) {
    this.know(known);
    if (needsJson(attributes)) this.#showJson(attributes);
    else this.#showRows(attributes);
  }

  // Replaces the suggestions and keeps the entered values.
  know(known) {
    this.kinds = new Map(known.map(({ name, kind }) => [name, kind]));
    this.names.replaceChildren(...known.map(({ name }) => element("option", { value: name })));
  }

  // Throws: RangeError that names the invalid attribute.
  read() {
    if (this.isJson) return checkedObject(this.text.value);
    const found = new Map();
    for (const { name, kind, value } of this.#fields()) {
      const key = name.value.trim();
      if (key === "" && value.value === "") continue;
      if (key === "") throw new RangeError("An attribute has no name.");
      if (found.has(key)) throw new RangeError(`The attribute ${key} is listed twice.`);
      found.set(key, readValue(key, kind.value, value.value));
    }
    return Object.fromEntries(found);
  }

  #fields() {
    return [...this.rows.children].map((row) => ({
      name: row.querySelector(".attribute-name"),
      kind: row.querySelector(".attribute-kind"),
      value: row.querySelector(".attribute-value"),
    }));
  }

  #showRows(attributes) {
    this.isJson = false;
    this.rows.replaceChildren();
    for (const [name, value] of Object.entries(attributes)) this.#addRow(name, value);
    this.#showForm();
  }

  #showJson(attributes) {
    this.isJson = true;
    this.text.value = JSON.stringify(attributes, null, 2);
    this.#showForm();
  }

  #showForm() {
    this.error.textContent = "";
    this.rows.hidden = this.isJson || this.rows.children.length === 0;
    this.add.hidden = this.isJson;
    this.text.hidden = !this.isJson;
    this.turn.textContent = this.isJson ? WORDS.rows : WORDS.json;
  }

  #turn() {
    try {
      const attributes = this.read();
      if (!this.isJson) return this.#showJson(attributes);
      if (needsJson(attributes)) throw new RangeError("Several values, line breaks, and spaces around a name can only be written as JSON.");
      this.#showRows(attributes);
    } catch (error) {
      this.error.textContent = error.message;
    }
  }

  #addRow(name, value, isNew = false) {
    const label = element("input", { className: "attribute-name", value: name, autocomplete: "off", ariaLabel: "Name" });
    label.type = "text";
    label.setAttribute("list", this.names.id);
    const kind = element("select", { className: "attribute-kind", ariaLabel: "Kind" }, ...optionsOf(KINDS));
    const row = element("li", { className: "attribute-row" }, label, kind);
    const setValue = (content) => {
      const field = valueField(kind.value, content);
      field.classList.add("attribute-value");
      field.ariaLabel = "Value";
      row.querySelector(".attribute-value")?.remove();
      kind.after(field);
    };
    kind.value = kindOf(value);
    setValue(value);
    kind.addEventListener("change", () => setValue(row.querySelector(".attribute-value").value));
    label.addEventListener("input", () => {
      const expected = this.kinds.get(label.value.trim());
      if (!expected || expected === kind.value || row.querySelector(".attribute-value").value !== "") return;
      kind.value = expected;
      setValue("");
    });
    row.append(this.#removal(row));
    this.rows.append(row);
    this.rows.hidden = false;
    if (isNew) label.focus();
  }

  #removal(row) {
    const button = element("button", { type: "button", className: "small round-small", ariaLabel: "Remove this attribute" }, icon("close"));
    button.addEventListener("click", () => {
      const next = row.nextElementSibling ?? row.previousElementSibling;
      row.remove();
      this.#showForm();
      (next?.querySelector(".attribute-name") ?? this.add).focus();
    });
    return button;
  }
}
