"""A fake kinlens-train: writes the files of a run at a given pace, then a bundle.

python fake_trainer.py BUNDLE SECONDS EPOCHS fit JOB --out RUN ... | export RUN --out BUNDLE
"""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    bundle, seconds, epochs, command, *words = sys.argv[1:]
    out = Path(words[words.index("--out") + 1])
    if command == "export":
        (Path(words[0]) / "exported.json").write_text(json.dumps(words))
        shutil.copytree(bundle, out)
        return
    if words[0] == "cub-nir":
        sys.exit("The data set is broken. Fix it.")
    (out / "job.json").write_text(json.dumps({"optimizer": {"epochs": int(epochs)}}))
    (out / "words.json").write_text(json.dumps(words))
    note_feedback(out, words)
    children = [subprocess.Popen(["sleep", "600"])]
    with (out / "log.jsonl").open("a") as log:
        for epoch in range(1, int(epochs) + 1):
            time.sleep(float(seconds))
            log.write(
                json.dumps({"kind": "epoch", "step": epoch, "epoch": epoch, "loss": 1 / epoch})
            )
            log.write("\n")
            log.flush()
            (out / "checkpoint.pt").write_text("state")
            sys.stdout.write(f"epoch {epoch}: grün\n")
            sys.stdout.flush()
    for child in children:
        child.kill()
        child.wait()
    (out / "train.csv").write_text("key,path,class\n" + "".join(trained_on(words)))
    (out / "result.json").write_text(json.dumps({"figures": {"R@1": 50.0}, "best_epoch": 2}))


def trained_on(words: list[str]) -> list[str]:
    """Rows of the first half of the class folders of the data set."""
    found = [re.search(r'root ?= ?"(.*?)"', word) for word in words]
    root = Path(next((match[1] for match in found if match), ""))
    folders = sorted({path.parent for path in root.glob("*/*.*")})
    return [
        f"{path.relative_to(root)},{path.relative_to(root)},{folder.name}\n"
        for folder in folders[: len(folders) // 2]
        for path in sorted(folder.iterdir())
    ]


def note_feedback(out: Path, words: list[str]) -> None:
    """What was there to learn from, and which of its names are files."""
    folders = [word.partition("=")[2] for word in words if word.startswith("data.feedback=")]
    for name in folders:
        folder = Path(json.loads(name))
        lines = (folder / "pairs.csv").read_text().splitlines()
        named = [cell for line in lines[1:] for cell in line.split(",")[:3] if cell]
        there = [(folder / cell).is_file() or (out / "data" / cell).is_file() for cell in named]
        (out / "feedback.json").write_text(json.dumps({"pairs": lines, "there": there}))


main()
