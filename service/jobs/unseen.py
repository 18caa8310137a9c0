"""What a gallery holds that a training has not seen: the only fair questions about its model."""

import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path

from embedder.types import AttributeValue
from indexer.gallery import Gallery


@dataclass(frozen=True, slots=True)
class Seen:
    """What a training learnt from: the sha256 (hex) of its pictures, and the names of its classes.

    Pictures of validation and test classes are not among them.
    """

    contents: frozenset[str]
    classes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unseen:
    """The keys to ask for, and what they have in common, as a clause."""

    keys: frozenset[str]
    clause: str


def seen_by(run: Path, root: Path) -> Seen | None:
    """What the run in folder `run` trained on, by its train.csv and the pictures in `root`.

    None if there is no such list, or its pictures lie neither in `root` nor in a folder of it.

    Raises: OSError.
    """
    try:
        with (run / "train.csv").open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    except FileNotFoundError:
        return None
    bases = [root, *sorted(path for path in root.glob("*") if path.is_dir())]
    base = next((b for b in bases if rows and (b / rows[0]["path"]).is_file()), None)
    if base is None:
        return None
    contents = (hashlib.sha256((base / row["path"]).read_bytes()).hexdigest() for row in rows)
    return Seen(frozenset(contents), frozenset(row["class"] for row in rows))


def unseen_in(gallery: Gallery, class_attribute: str, seen: Seen | None) -> Unseen:
    """Items of classes that were not trained on; where there are none, pictures that were not.

    A class was trained on if one of its pictures was, or a class of its name. Where nothing is
    known of the training, everything counts as seen.
    """
    if seen is None:
        return Unseen(frozenset(), " that are known not to be trained on")
    items = [(i.key, i.sha256, i.attributes.get(class_attribute)) for i in gallery.items()]
    trained = {name for _, content, name in items if content in seen.contents}
    keys = {key for key, content, name in items if not _is_known(name, content, trained, seen)}
    if keys:
        return Unseen(frozenset(keys), ", classes that the new model was not trained on")
    fresh = {key for key, content, _ in items if content not in seen.contents}
    return Unseen(
        frozenset(fresh), " that the new model was not trained on, though on others of their class"
    )


def _is_known(
    name: AttributeValue | None, content: str, trained: set[AttributeValue | None], seen: Seen
) -> bool:
    return name is None or name in trained or str(name) in seen.classes or content in seen.contents
