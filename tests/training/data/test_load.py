"""Images of one's own: folders, CSVs, drawn products, and their split."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kinlens.embedder.errors import DatasetError
from kinlens.embedder.preprocess import decode
from kinlens.training.config.settings import CsvData, FolderData, RenderedData
from kinlens.training.data.load import load_split, read_folder, read_table, remarks, split_by_class
from kinlens.training.data.records import Record
from tests.tiny import encoded, photo


def fill(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(photo(number)))
    return root


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    names = [f"{product}/{view}.png" for product in ("mug", "hat", "pen", "cup") for view in "123"]
    return fill(tmp_path, *names)


def test_the_class_of_an_image_is_the_folder_that_holds_it(shop: Path) -> None:
    fill(shop, "men/mug/4.jpg", ".cache/x.png", "hat/.hidden.png", "loose.png")
    (shop / "hat" / "notes.txt").write_text("no image")
    records = read_folder(shop)
    assert len(records) == 13
    assert Record("men/mug/4.jpg", "men/mug") in records
    assert Record("mug/1.png", "mug") in records


def test_a_missing_or_flat_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nowhere does not exist. Check data.root"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match="no images in sub-folders"):
        read_folder(fill(tmp_path, "flat.png"))
    with pytest.raises(DatasetError, match=r"f\\xfcr.png: The name is not UTF-8.*Rename"):
        read_folder(fill(tmp_path / "old", "mug/f\udcfcr.png"))
    with pytest.raises(DatasetError, match=r"'far/shop' is a relative path.*--set data.root=/path"):
        load_split(FolderData(kind="folder", root="far/shop"))
    with pytest.raises(DatasetError, match=r"images.csv cannot be read.*Check data.root"):
        read_table(tmp_path, "images.csv")


def test_no_class_is_on_both_sides_of_a_split_that_depends_on_its_seed_alone(shop: Path) -> None:
    split = load_split(FolderData(kind="folder", root=str(shop)))
    assert set(split.train.class_names).isdisjoint(split.test.class_names)
    assert len(split.train) + len(split.test) == 12
    assert split.train.classes == split.test.classes == 2
    assert set(split.train.labels.tolist()) == {0, 1}
    records = read_folder(shop)
    splits = [split_by_class(shop, records, 0.5, seed) for seed in range(6)]
    again = split_by_class(shop, list(reversed(records)), 0.5, 3)
    assert again.sha256() == splits[3].sha256()
    assert len({split.sha256() for split in splits}) > 1
    for fraction in (0.01, 0.99):
        split = split_by_class(shop, records, fraction, 0)
        assert split.train.classes == split.test.classes == 2


def test_a_growing_shop_keeps_its_test_classes() -> None:
    """A bundle that is continued, or compared with, was then not trained on them."""
    records = [Record(f"{c}/{i}.png", f"mug {c}") for c in range(60) for i in range(2)]
    trained = {
        classes: set(split_by_class(Path(), records[: 2 * classes], 0.5, 0).train.class_names)
        for classes in range(4, 61)
    }
    for classes in range(4, 60):
        before = set(split_by_class(Path(), records[: 2 * classes], 0.5, 0).test.class_names)
        assert (
            len(before & trained[classes + 1]) + len(trained[classes] - trained[classes + 1]) <= 1
        )
    assert len(trained[60] & trained[50]) > 20


def test_fewer_than_four_classes_are_refused_before_anything_is_trained(shop: Path) -> None:
    fill(shop, "lone/1.png")
    for name in ("mug", "hat"):
        for path in (shop / name).iterdir():
            path.unlink()
    with pytest.raises(DatasetError, match=r"has 2 class\(es\) .* 4 are needed, 2 to train on"):
        load_split(FolderData(kind="folder", root=str(shop), small_classes="drop"))
    with pytest.raises(DatasetError, match=r"has 3 class\(es\) to train and test with"):
        load_split(RenderedData(kind="rendered", root=str(shop / "drawn"), products=3, views=2))


def test_a_class_with_one_image_is_refused_by_name_or_dropped(shop: Path) -> None:
    fill(shop, "lone/1.png")
    with pytest.raises(DatasetError, match=r"1 of the 5 classes .*'lone'.*small_classes"):
        load_split(FolderData(kind="folder", root=str(shop)))
    data = FolderData(kind="folder", root=str(shop), small_classes="drop")
    split = load_split(data)
    assert "lone" not in split.train.class_names + split.test.class_names
    assert remarks(data, split) == [
        "1 class(es) of one image are dropped: they have no pair: 'lone'"
    ]


def test_damaged_images_are_skipped_and_listed_up_to_a_limit(shop: Path) -> None:
    fill(shop, "bag/1.png", "bag/2.png", *(f"mug/{view}.png" for view in range(4, 12)))
    whole = load_split(FolderData(kind="folder", root=str(shop)))
    assert not whole.damaged
    data = encoded(photo(1, (300, 200)), "JPEG")
    (shop / "bag" / "2.png").write_bytes(data[: len(data) // 2])
    (shop / "mug" / "1.png").write_bytes(b"")
    job = FolderData(kind="folder", root=str(shop))
    split = load_split(job)
    found = [line.split(": ")[0] for line in split.damaged]
    assert found == ["bag/2.png", "mug/1.png"]
    assert split.dropped_classes == ("bag",), "one image of it is left"
    assert sum(len(part) for part in split.parts.values()) == 22 - 2 - 1
    text = " ".join(remarks(job, split))
    assert "2 image(s) are missing or damaged, and skipped: bag/2.png: " in text
    assert "1 class(es) of one image are dropped" in text
    strict = job.model_copy(update={"max_damaged": 0.05})
    with pytest.raises(DatasetError, match=r"2 of the 22 images .*data.max_damaged = 0.05.*bag/2"):
        load_split(strict)
    (shop / "mug" / "1.png").write_bytes(encoded(photo(77)))
    assert len(load_split(job).damaged) == 1, "the content decides, not the name"
    rows = [f"{record.path},{record.label}" for record in read_folder(shop)]
    (shop / "images.csv").write_text("\n".join(["path,class", *rows, "pen/gone.png,pen"]))
    listed = load_split(CsvData(kind="csv", root=str(shop), small_classes="drop"))
    assert [line.split(": ")[0] for line in listed.damaged] == ["bag/2.png", "pen/gone.png"]
    for path in shop.glob("[hm]*/*.png"):  # a part of the images is on a disk that is not there
        path.unlink()
    with pytest.raises(DatasetError, match=r"16 of the 23 images .* missing or damaged, above"):
        load_split(CsvData(kind="csv", root=str(shop)))


def test_a_readable_image_is_decoded_once(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shop / "cache"))
    decoded: list[int] = []

    def counted(data: bytes, **options: int) -> object:
        decoded.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr("kinlens.training.data.load.decode", counted)
    data = FolderData(kind="folder", root=str(shop), max_damaged=0.2)
    whole = load_split(data).sha256()
    assert len(decoded) == 12
    assert load_split(data).sha256() == whole
    assert len(decoded) == 12
    path = shop / "mug" / "1.png"
    path.write_bytes(bytes(path.stat().st_size))
    assert len(load_split(data).damaged) == 1
    assert len(decoded) == 13
    (shop / "cache").rename(shop / "old")
    (shop / "cache").write_text("a file where the cache should be")
    assert len(load_split(data).damaged) == 1, "the cache saves time and no more"


@pytest.fixture
def table(shop: Path) -> Callable[[str], CsvData]:
    def make(text: str) -> CsvData:
        (shop / "images.csv").write_text(text, encoding="utf-8-sig")
        return CsvData(kind="csv", root=str(shop))

    return make


def test_a_csv_states_labels_and_may_state_the_split(table: Callable[[str], CsvData]) -> None:
    rows = "".join(
        f"{product}/{view}.png,{product},{part}\n"
        for product, part in (("mug", "train"), ("hat", "test"), ("pen", "train"), ("cup", "test"))
        for view in "123"
    )
    split = load_split(table("path,label,split\n" + rows))
    assert split.train.class_names == ("mug", "pen")
    assert split.test.class_names == ("cup", "hat")
    one_left = rows.replace("cup,test", "cup,train")
    with pytest.raises(DatasetError, match=r"has 1 test class\(es\)"):
        load_split(table("path,label,split\n" + one_left))
    unsplit = rows.replace(",train", "").replace(",test", "")
    split = load_split(table("path,label\n" + unsplit))
    assert len(split.train) == len(split.test) == 6


def test_a_csv_finds_files_and_classes_in_both_unicode_forms(shop: Path) -> None:
    fill(shop, "cafe\u0301/1.png", "cafe\u0301/2.png")
    rows = "caf\xe9/1.png,caf\xe9\ncafe\u0301/2.png,cafe\u0301\n"
    (shop / "images.csv").write_text(f"path,label\n{rows}", encoding="utf-8")
    records = read_table(shop, "images.csv")
    assert records == [Record(f"cafe\u0301/{view}.png", "caf\xe9") for view in "12"]
    for encoding, message in (("utf-16", "is UTF-16.*CSV UTF-8"), ("cp1252", ":2 is not UTF-8")):
        (shop / "images.csv").write_text("path,label\ncaf\xe9/1.png,caf\xe9\n", encoding=encoding)
        with pytest.raises(DatasetError, match=message):
            read_table(shop, "images.csv")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("path,product,price:number", "Mug 1"),
        ("Path,Product:text,class", "mugs"),
        ("path,product,label,class", "label"),
        ("path,key,title", "Mug-Key"),
    ],
)
def test_the_class_of_a_row_per_product_is_its_product(
    shop: Path, columns: str, expected: str
) -> None:
    cells = {"product": "Mug 1", "class": "mugs", "label": "label", "key": "Mug-Key"}
    cells |= {"price": "2.20", "title": "A mug, blue"}
    (shop / "mug" / ".DS_Store").write_bytes(b"no image")
    names = [name.partition(":")[0].lower() for name in columns.split(",")]
    lines = [columns]
    for path in ("mug", "hat/1.png | hat/2.png", '["pen/1.png", "pen/3.png"]', "cup/1.png"):
        row = [path if name == "path" else cells[name] for name in names]
        lines.append(",".join('"' + cell.replace('"', '""') + '"' for cell in row))
    (shop / "images.csv").write_text("\n".join(lines))
    records = read_table(shop, "images.csv")
    paths = [f"mug/{n}.png" for n in "123"] + ["hat/1.png", "hat/2.png", "pen/1.png", "pen/3.png"]
    assert records == [Record(path, expected) for path in [*paths, "cup/1.png"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\nx,y\n", "the columns path, label or class or product.*names file, label"),
        ("path;label\nx;y\n", "separated by semicolons.*Save it separated by commas"),
        ("path\tlabel\nx\ty\n", "separated by tabs.*Save it separated by commas"),
        ("path,label\nmug/1.png,\n", "line 2: path and label must not be empty"),
        ("path,label\nmug/1.png,a\n./mug/1.png,b\n", "line 3: ./mug/1.png is listed a second time"),
        ("path, label\nmug/1.png, Mug, blue\n", 'line 2: .* into quotes: "Mug, blue"'),
        ("path,product\n[1],a\n", r"line 2: the path '\[1\]' is not a list of files"),
        ("path,label\nmug/1.png,a\nmug/9.png,a\n", r"mug/9.png: The file is missing"),
        (
            "path,label,split\nmug/1.png,a,train\nmug/2.png,a,test\n"
            "hat/1.png,b,train\nhat/2.png,b,test\n",
            "in train and in test, for example 'a'",
        ),
        (
            "path,label,split\nmug/1.png,a,train\nmug/2.png,a,train\n"
            "hat/1.png,b,dev\nhat/2.png,b,dev\n",
            "has 'dev', 'train'",
        ),
    ],
)
def test_a_wrong_csv_line_is_named(
    table: Callable[[str], CsvData], text: str, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        load_split(table(text))
