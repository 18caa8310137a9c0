"""The types of the HTTP API in TypeScript: what they allow and refuse, by the real compiler."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.typescript import declarations, type_of
from tests.golden.contract import CONTRACT
from tests.support.own_process import ROOT

USES = """
import { search, Search } from "./search";
import type { Operations } from "./kinlens";

export async function walk(): Promise<string[]> {
  const query: Search = { gallery: "shop", images: [{ data: "aGk=" }], k: 5 };
  const answer = await search("http://127.0.0.1:8000", query);
  return answer.hits.map((hit) => `${hit.key} ${hit.score.toFixed(3)}`);
}
export const near: Operations["GET /galleries/{name}/items/{item_id}/similar"]["path"] = {
  name: "shop",
  item_id: 7,
};
// @ts-expect-error the number of hits must be a number
export const wrongValue: Search = { images: [{ data: "aGk=" }], k: "5" };
// @ts-expect-error no such field
export const wrongName: Search = { images: [{ data: "aGk=" }], top_k: 5 };
// @ts-expect-error not one of the choices
export const wrongChoice: Search = { images: [{ data: "aGk=" }], combine: "median" };
// @ts-expect-error no such route
export type Wrong = Operations["POST /serach"];
"""


def test_the_compiler_accepts_right_programs_and_refuses_wrong_ones(tmp_path: Path) -> None:
    """Each wrong line is marked; the compiler fails where it has no error, too."""
    tsc = shutil.which("tsc")
    if tsc is None:
        pytest.skip("needs the TypeScript compiler: apt-get install node-typescript")
    document = json.loads(CONTRACT.read_text(encoding="utf-8"))
    (tmp_path / "kinlens.d.ts").write_text(declarations(document), encoding="utf-8")
    [shown] = re.findall(r"```ts\n(.*?)```", (ROOT / "docs/api.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "search.ts").write_text(shown, encoding="utf-8")
    (tmp_path / "uses.ts").write_text(USES, encoding="utf-8")
    options = ("--strict", "--noEmit", "--skipLibCheck", "--target", "es2020", "uses.ts")
    done = subprocess.run([tsc, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_kind_of_schema_that_is_unknown_is_an_error() -> None:
    with pytest.raises(KeyError):
        type_of({"oneOf": [{"type": "string"}]})
