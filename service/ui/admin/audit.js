// The audit log: changes and refused attempts, newest first, a page at a time.

import { listAudit } from "./api.js";
import { moment, table } from "./status.js";
import { whileBusy } from "./work.js";
import { onSubmit, ui } from "../shared/dom.js";
import { grouped, plural } from "../shared/format.js";

const PAGE = 100;
const HEAD = ["When", "Who", "Action", "Gallery", "Changed", "Status", "From"];
let entries = [];

const cellsOf = ({ time, by, action, gallery, target, affected, status, client }) => [
  moment(time),
  by,
  action,
  gallery ?? "",
  [target, affected === null ? null : grouped(affected)].filter(Boolean).join(": "),
  status === 0 ? "no answer" : String(status),
  client ?? "",
];

function show() {
  const words = ui["audit-words"].value.trim().toLowerCase();
  const rows = entries.map(cellsOf).filter((cells) => cells.join(" ").toLowerCase().includes(words));
  ui["audit-frame"].replaceChildren(table("Changes and refused attempts", HEAD, rows, "audit-table"));
  const all = plural(entries.length, "entry").replace(/entrys$/, "entries");
  ui["audit-count"].textContent = words === "" ? all : `${grouped(rows.length)} of ${all}`;
}

async function more() {
  const page = await listAudit(PAGE, entries.at(-1)?.number);
  entries.push(...page);
  ui["audit-older"].hidden = page.length < PAGE;
  show();
}

export async function showAudit() {
  entries = [];
  await more();
}

export function startAudit() {
  onSubmit(ui["audit-form"], () => {});
  ui["audit-words"].addEventListener("input", show);
  ui["audit-older"].addEventListener("click", () => whileBusy(ui["audit-older"], more));
}
