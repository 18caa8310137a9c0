"""The data sets of the literature in their official layout, with class-disjoint splits.

A data set is an entry of OFFICIAL: the files of its folder, the reader of its lists, and the number
of images and classes of each part.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from kinlens.embedder.errors import DatasetError
from kinlens.training.data.records import Record, Split, labelled

T = TypeVar("T")

_PARTIAL = "For a subset set data.allow_partial = true (--allow-partial)."


class Count(NamedTuple):
    images: int
    classes: int


@dataclass(frozen=True)
class Official:
    """A data set: the reader of its lists, and the size of each part.

    Of a tuple in `needs` one file or folder is enough. With a "gallery" the test images are the
    queries. `image_root` is the folder that the paths of records are relative to.
    """

    name: str
    needs: tuple[tuple[str, ...], ...]
    expected: Mapping[str, Count]
    read: Callable[[Path], list[Record]]
    image_root: Callable[[Path], Path] = lambda root: root

    def lacks(self, root: Path) -> list[str]:
        return [
            " or ".join(names)
            for names in self.needs
            if not any((root / name).exists() for name in names)
        ]

    def records(self, root: Path) -> list[Record]:
        """The records of the lists, whether the images exist or not. Raises: DatasetError."""
        lacking = self.lacks(root)
        if not lacking:
            return self.read(root)
        below = [path for path in data_sets_in(root) if not self.lacks(path)]
        raise DatasetError(
            f"{root} is not {self.name} in the official layout: it lacks {', '.join(lacking)}. "
            f"Check data.root{f'; {below[0]} looks right' if below else ''}."
        )

    def differs(self, records: Iterable[Record]) -> str:
        """Found and expected counts in words; empty if they are equal."""
        found = {part: Count(0, 0) for part in self.expected} | counts(records)
        if found == dict(self.expected):
            return ""
        has, wanted = (
            ", ".join(
                f"{size.images:,} {part} images of {size.classes:,} classes"
                for part, size in sizes.items()
            )
            for sizes in (found, self.expected)
        )
        return f"{has}; expected: {wanted}"


def counts(records: Iterable[Record]) -> dict[str, Count]:
    """Images and classes of each part, or of "all" if there are no parts."""
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        labels[record.part or "all"][record.label] += 1
    return {part: Count(found.total(), len(found)) for part, found in labels.items()}


def data_sets_in(root: Path) -> list[Path]:
    """Sub-folders that are complete official layouts, if `root` is one level too high."""
    return [
        path
        for path in (sorted(root.iterdir()) if root.is_dir() else ())
        if any(not official.lacks(path) for official in OFFICIAL.values())
    ]


def read_official(official: Official, root: Path, allow_partial: bool) -> Split:
    """Read a data set and check its counts; a partial one may differ. Raises: DatasetError."""
    records, base = official.records(root), official.image_root(root)
    missing = [record for record in records if not (base / record.path).is_file()]
    if missing and not allow_partial:
        raise DatasetError(
            f"{len(missing):,} of the {len(records):,} images that {official.name} lists are "
            f"missing in {base}, for example {missing[0].path}. Unpack the images again. {_PARTIAL}"
        )
    kept = list(set(records) - set(missing))
    differing = official.differs(kept)
    if differing and not allow_partial:
        raise DatasetError(f"{official.name} in {root} has {differing}. {_PARTIAL}")
    parts = {
        part: labelled(base, [record for record in kept if record.part == part])
        for part in official.expected
    }
    for part, images in parts.items():
        if not len(images):
            raise DatasetError(f"{root} has no {part} image of {official.name}.")
    return Split(parts["train"], parts["test"], gallery=parts.get("gallery"))


def _rows(path: Path, columns: int, read: Callable[..., T], skip: int = 0) -> list[T]:
    """`read` applied to the fields of each line; the last field takes the rest of its line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{path} cannot be read ({error}). Unpack the data set again."
        ) from error
    rows = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and number > skip:
            try:
                fields = line.split(None, columns - 1)
                if len(fields) < columns:
                    raise ValueError("a field is missing")
                rows.append(read(*fields))
            except (ValueError, KeyError) as error:
                raise DatasetError(
                    f"{path}, line {number}: {line!r} does not fit the layout ({error}). "
                    "Unpack the data set again."
                ) from error
    return rows


def _pair(key: str, value: str) -> tuple[str, str]:
    return key, value


def _read_cub(root: Path) -> list[Record]:
    """Classes 1-100 train, 101-200 test: `images.txt`, `classes.txt`, `image_class_labels.txt`.

    `train_test_split.txt` is for classification (every class in both parts) and is not read.
    """
    names = dict(_rows(root / "classes.txt", 2, _pair))
    images = dict(_rows(root / "images.txt", 2, _pair))

    def record(image: str, label: str) -> Record:
        part = "train" if int(label) <= 100 else "test"
        return Record(f"images/{images[image]}", names[label], part)

    return _rows(root / "image_class_labels.txt", 2, record)


def _read_cars196(root: Path) -> list[Record]:
    """Classes 1-98 train, 99-196 test: `cars_annos.mat` has path and class of each image."""
    import scipy.io  # here, since its import takes a second

    annotations = root / "cars_annos.mat"
    try:
        table = scipy.io.loadmat(annotations, squeeze_me=True)["annotations"]
        rows = [(str(row["relative_im_path"]), int(row["class"])) for row in table]
    except Exception as error:
        # scipy raises key, index, value, zlib, struct and its own errors on a damaged file.
        raise DatasetError(
            f"{annotations} is not the annotation file of Cars196 ({error}). Download it again."
        ) from error
    return [
        Record(path, f"{label:03d}", "train" if label <= 98 else "test") for path, label in rows
    ]


def _read_sop(root: Path) -> list[Record]:
    """`Ebay_train.txt` (11,318 classes) and `Ebay_test.txt`: a header, then one row per image."""

    def rows(part: str) -> list[Record]:
        def record(_image: str, label: str, _super_class: str, path: str) -> Record:
            return Record(path, f"{int(label):05d}", part)

        return _rows(root / f"Ebay_{part}.txt", 4, record, skip=1)

    return rows("train") + rows("test")


_IN_SHOP_LISTS = tuple(f"{folder}list_eval_partition.txt" for folder in ("Eval/", "Anno/", ""))


def _read_in_shop(root: Path) -> list[Record]:
    """`list_eval_partition.txt`: number of images, a header, then one row per image."""
    parts = {"train": "train", "query": "test", "gallery": "gallery"}
    path = next(root / name for name in _IN_SHOP_LISTS if (root / name).exists())
    return _rows(path, 3, lambda image, label, part: Record(image, label, parts[part]), skip=2)


def _in_shop_images(root: Path) -> Path:
    """The list has img/...; the authors' archive unpacks to Img/img/ or, as many keep it, img/."""
    return root / "Img" if (root / "Img" / "img").is_dir() else root


_AIRCRAFT_LISTS = tuple(f"data/images_variant_{part}.txt" for part in ("train", "val", "test"))


def _read_aircraft(root: Path) -> list[Record]:
    """The first 50 variants of `variants.txt` train; the three lists of images are taken together.

    **Reading**: the strip of 20 px with the photographer's name at the bottom of each image stays;
    a centre crop of 224 of 256 px removes it from images of at least 320 px.
    """
    order = {name: n for n, name in enumerate(_rows(root / "data" / "variants.txt", 1, str))}

    def record(image: str, variant: str) -> Record:
        part = "train" if order[variant] < 50 else "test"
        return Record(f"data/images/{image}.jpg", variant, part)

    return [row for name in _AIRCRAFT_LISTS for row in _rows(root / name, 2, record)]


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
