"""The data sets of the literature in the layout of their authors, with class-disjoint splits.

A data set is an entry of OFFICIAL: what its folder holds, how its lists are read, and how many
images and classes each part must have.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import scipy.io

from embedder.errors import DatasetError
from training.data.records import Split, labelled

_PARTIAL = "For a subset set data.allow_partial = true (--allow-partial)."


class Record(NamedTuple):
    """An image as a list states it; `origin` is the file and line that does."""

    part: str
    path: str
    label: str
    origin: str


class Count(NamedTuple):
    """Size of a part."""

    images: int
    classes: int


@dataclass(frozen=True)
class Official:
    """A data set.

    Args:
        name: for messages.
        needs: what its folder holds; of a tuple one is enough.
        expected: size of each part: "train", "test" and perhaps "gallery". With a gallery the
            test images are the queries.
        read: the records of a folder that has what `needs` says.
        image_root: the folder that the paths of records are relative to, from the data set's own.
    """

    name: str
    needs: tuple[tuple[str, ...], ...]
    expected: Mapping[str, Count]
    read: Callable[[Path], Iterable[Record]]
    image_root: Callable[[Path], Path] = lambda root: root

    def lacks(self, root: Path) -> list[str]:
        """What `root` lacks."""
        return [
            " or ".join(names)
            for names in self.needs
            if not any((root / name).exists() for name in names)
        ]

    def differs(self, records: Iterable[Record]) -> str:
        """Found and expected counts in words; empty if they are equal."""
        found = {part: Count(0, 0) for part in self.expected} | counts(records)
        if found == dict(self.expected):
            return ""
        return f"{self._in_words(found)}; expected are {self._in_words(self.expected)}"

    def called(self, part: str) -> str:
        """The name of a part in messages."""
        return "query" if part == "test" and "gallery" in self.expected else part

    def _in_words(self, sizes: Mapping[str, Count]) -> str:
        return ", ".join(
            f"{size.images:,} {self.called(part)} images of {size.classes:,} classes"
            for part, size in sizes.items()
        )


def counts(records: Iterable[Record]) -> dict[str, Count]:
    """Images and classes of each part."""
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        labels[record.part][record.label] += 1
    return {part: Count(found.total(), len(found)) for part, found in labels.items()}


def list_records(official: Official, root: Path) -> list[Record]:
    """What the lists in `root` state, whether the images exist or not.

    Raises: DatasetError if a list is missing or malformed, or states an image twice.
    """
    if official.lacks(root):
        raise DatasetError(_not_official(official, root))
    records = list(official.read(root))
    first: dict[str, Record] = {}
    for record in records:
        other = first.setdefault(record.path, record)
        if other is not record:
            raise DatasetError(
                f"{record.origin}: {record.path} is listed a second time; first in {other.origin}. "
                "Unpack the data set again."
            )
    return records


def read_official(official: Official, root: Path, allow_partial: bool = False) -> Split:
    """Read the data set in the folder `root` and assert its counts.

    `allow_partial` accepts missing images and other counts: a subset.

    Raises: DatasetError if lists are missing or malformed, images are missing, counts differ, or
        a part is empty.
    """
    records, base = list_records(official, root), official.image_root(root)
    kept = [record for record in records if (base / record.path).is_file()]
    if len(kept) < len(records) and not allow_partial:
        first = next(record for record in records if not (base / record.path).is_file())
        raise DatasetError(
            f"{len(records) - len(kept):,} of the {len(records):,} images that {official.name} "
            f"lists are missing in {base}, for example {first.path} ({first.origin}). Unpack the "
            f"images again. {_PARTIAL}"
        )
    differing = official.differs(kept)
    if differing and not allow_partial:
        raise DatasetError(f"{official.name} in {root} has {differing}. {_PARTIAL}")
    parts = {
        part: labelled(base, [(r.path, r.label) for r in kept if r.part == part])
        for part in official.expected
    }
    for part, images in parts.items():
        if not len(images):
            raise DatasetError(f"{root} holds no {official.called(part)} image of {official.name}.")
    split = Split(parts["train"], parts["test"], gallery=parts.get("gallery"))
    if split.without_gallery and not allow_partial:
        raise DatasetError(
            f"{len(split.without_gallery)} class(es) of queries of {official.name} have no image "
            f"in the gallery, for example {split.without_gallery[0]!r}. Unpack the data set again. "
            f"{_PARTIAL}"
        )
    return split


def _not_official(official: Official, root: Path) -> str:
    needs = ", ".join(" or ".join(names) for names in official.needs)
    message = (
        f"{root} is not {official.name} in the official layout: it must hold {needs}; "
        f"it lacks {', '.join(official.lacks(root))}."
    )
    if not root.is_dir():
        return f"{message} The folder does not exist. Check data.root."
    below = sorted(p for p in root.iterdir() if p.is_dir() and not official.lacks(p))
    return f"{message} Check data.root" + (f"; {below[0]} looks right." if below else ".")


class _Line(NamedTuple):
    """A line of a list; `origin` is the file and its number."""

    origin: str
    text: str

    def fault(self, what: str) -> DatasetError:
        return DatasetError(f"{self.origin}: {what}. Unpack the data set again.")

    def split(self, columns: str) -> list[str]:
        """The fields, separated by white space, one a column; the last takes the rest."""
        most = len(columns.split())
        fields = self.text.split(None, most - 1)
        if len(fields) < most:
            raise self.fault(f"{self.text!r} lacks a field; a line is '{columns}'")
        return fields

    def number(self, text: str, most: int) -> int:
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
            raise self.fault(f"{text!r} is not a number from 1 to {most:,}")
        return int(text)

    def record(self, part: str, path: str, label: str) -> Record:
        """An image by its path below the folder of images, which must not lead out of it."""
        inside = PurePosixPath(path)
        if inside.is_absolute() or ".." in inside.parts:
            raise self.fault(f"the image {path!r} lies outside the data set")
        return Record(part, inside.as_posix(), label, self.origin)


def _lines(path: Path) -> list[_Line]:
    """The lines that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path} is not a text file ({error.reason} at byte {error.start}). "
            "Unpack the data set again."
        ) from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}.") from error
    numbered = enumerate((line.strip() for line in lines), start=1)
    return [_Line(f"{path}, line {number}", line) for number, line in numbered if line]


def _read_cub(root: Path) -> Iterator[Record]:
    """Classes 1-100 train, 101-200 test: `images.txt`, `classes.txt`, `image_class_labels.txt`.

    `train_test_split.txt` is for classification (every class in both parts) and is not read.
    """

    def by_id(path: Path) -> dict[str, tuple[_Line, str]]:
        found: dict[str, tuple[_Line, str]] = {}
        for line in _lines(path):
            key, value = line.split("id name")
            if key in found:
                raise line.fault(f"the id {key} is used a second time")
            found[key] = line, value
        return found

    names, images = by_id(root / "classes.txt"), by_id(root / "images.txt")
    for line in _lines(root / "image_class_labels.txt"):
        image, label = line.split("image_id class_id")
        part = "train" if line.number(label, 200) <= 100 else "test"
        if label not in names:
            raise line.fault(f"class {label} is not in classes.txt")
        if image not in images:
            raise line.fault(f"image {image} is not in images.txt or has two classes")
        listed, path = images.pop(image)
        yield listed.record(part, f"images/{path}", names[label][1])
    for image, (line, path) in images.items():
        raise line.fault(f"image {image} ({path}) has no class in image_class_labels.txt")


def _read_cars196(root: Path) -> Iterator[Record]:
    """Classes 1-98 train, 99-196 test: `cars_annos.mat` has path and class of each image."""
    annotations = root / "cars_annos.mat"
    try:
        table = scipy.io.loadmat(annotations, squeeze_me=True)["annotations"]
        rows = [(str(row["relative_im_path"]), str(int(row["class"]))) for row in table]
    except Exception as error:
        # scipy raises key, index, value, zlib, struct and its own errors on a damaged file.
        raise DatasetError(
            f"{annotations} is not the annotation file of Cars196 ({error}). Download it again."
        ) from error
    for row, (path, label) in enumerate(rows, start=1):
        line = _Line(f"{annotations}, row {row}", path)
        number = line.number(label, 196)
        yield line.record("train" if number <= 98 else "test", path, f"{number:03d}")


def _read_sop(root: Path) -> Iterator[Record]:
    """`Ebay_train.txt` (11,318 classes) and `Ebay_test.txt`: a heading, then a row an image."""
    columns = "image_id class_id super_class_id path"
    for part in ("train", "test"):
        path = root / f"Ebay_{part}.txt"
        heading, *rows = _lines(path) or [_Line(f"{path}, line 1", "")]
        if heading.text.split() != columns.split():
            raise heading.fault(f"the file must begin with the line '{columns}'")
        for line in rows:
            _, label, _, image = line.split(columns)
            yield line.record(part, image, f"{line.number(label, 22634):05d}")


_IN_SHOP_LISTS = tuple(f"{folder}list_eval_partition.txt" for folder in ("Eval/", "Anno/", ""))


def _read_in_shop(root: Path) -> Iterator[Record]:
    """`list_eval_partition.txt`: number of images, a heading, then a row an image."""
    columns = "image_name item_id evaluation_status"
    parts = {"train": "train", "query": "test", "gallery": "gallery"}
    path = next(root / name for name in _IN_SHOP_LISTS if (root / name).exists())
    lines = _lines(path)
    if len(lines) < 2 or lines[1].text.split() != columns.split():
        raise _Line(f"{path}, line 2", "").fault(
            f"the file must begin with the number of images and the line '{columns}'"
        )
    for line in lines[2:]:
        image, label, status = line.split(columns)
        if status not in parts:
            raise line.fault(f"{status!r} is not one of {', '.join(parts)}")
        yield line.record(parts[status], image, label)


def _in_shop_images(root: Path) -> Path:
    """The list says img/...; the authors' archive unpacks to Img/img/ or, as many keep it, img/."""
    return root / "Img" if (root / "Img" / "img").is_dir() else root


_AIRCRAFT_LISTS = tuple(f"data/images_variant_{part}.txt" for part in ("train", "val", "test"))


def _read_aircraft(root: Path) -> Iterator[Record]:
    """The first 50 variants of `variants.txt` train; the three lists of images are taken together.

    **Reading**: the strip of 20 px with the photographer's name at the foot of each picture stays;
    a centre crop of 224 of 256 px cuts it off in pictures of at least 320 px.
    """
    order: dict[str, int] = {}
    for line in _lines(root / "data" / "variants.txt"):
        if line.text in order:
            raise line.fault(f"the variant {line.text!r} is listed a second time")
        order[line.text] = len(order)
    for line in (line for name in _AIRCRAFT_LISTS for line in _lines(root / name)):
        image, variant = line.split("image variant")
        if variant not in order:
            raise line.fault(f"the variant {variant!r} is not in variants.txt")
        part = "train" if order[variant] < 50 else "test"
        yield line.record(part, f"data/images/{image}.jpg", variant)


OFFICIAL: Mapping[str, Official] = {
    "cub": Official(
        name="CUB-200-2011",
        needs=(("images.txt",), ("image_class_labels.txt",), ("classes.txt",), ("images",)),
        expected={"train": Count(5864, 100), "test": Count(5924, 100)},
        read=_read_cub,
    ),
    "cars196": Official(
        name="Cars196",
        needs=(("cars_annos.mat",), ("car_ims",)),
        expected={"train": Count(8054, 98), "test": Count(8131, 98)},
        read=_read_cars196,
    ),
    "sop": Official(
        name="Stanford Online Products",
        needs=(("Ebay_train.txt",), ("Ebay_test.txt",)),
        expected={"train": Count(59551, 11318), "test": Count(60502, 11316)},
        read=_read_sop,
    ),
    "in_shop": Official(
        name="In-Shop Clothes Retrieval",
        needs=(_IN_SHOP_LISTS, ("img", "Img/img")),
        expected={
            "train": Count(25882, 3997),
            "test": Count(14218, 3985),
            "gallery": Count(12612, 3985),
        },
        read=_read_in_shop,
        image_root=_in_shop_images,
    ),
    "aircraft": Official(
        name="FGVC-Aircraft",
        needs=(("data/variants.txt",), *((name,) for name in _AIRCRAFT_LISTS), ("data/images",)),
        expected={"train": Count(5000, 50), "test": Count(5000, 50)},
        read=_read_aircraft,
    ),
}
"""By `data.kind`: The Caltech-UCSD Birds-200-2011 Dataset (Wah et al., 2011); 3D Object
Representations for Fine-Grained Categorization (Krause et al., 2013); Deep Metric Learning via
Lifted Structured Feature Embedding (Song et al., 2016); DeepFashion (Liu et al., 2016);
Fine-Grained Visual Classification of Aircraft (Maji et al., 2013)."""
