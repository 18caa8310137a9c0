"""The `data` table of a job: which images, and where."""

from typing import Annotated, Literal

from pydantic import Field

from training.config.section import Section


class Drawn(Section):
    """Images whose classes are split here, by a seeded draw, where no list says how."""

    root: str
    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)


class FolderData(Drawn):
    """A folder with a sub-folder for each class; the classes are split into train and test."""

    kind: Literal["folder"]
    small_classes: Literal["refuse", "drop"] = "refuse"


class CsvData(Drawn):
    """A CSV with the columns path, label and, optionally, split (train or test)."""

    kind: Literal["csv"]
    file: str = "images.csv"
    small_classes: Literal["refuse", "drop"] = "refuse"


class RenderedData(Drawn):
    """A catalogue of rendered products, drawn into `root` if it is not there yet."""

    kind: Literal["rendered"]
    products: int = 90
    views: int = 16
    size_px: int = 160
    seed: int = 0


class Official(Section):
    """A data set of the literature as its authors give it out, or with a part of its images."""

    root: str
    allow_partial: bool = False


class Cars196Data(Official):
    """Cars196: `car_ims/` and `cars_annos.mat`."""

    kind: Literal["cars196"]


class CubData(Official):
    """CUB-200-2011: `images/` and its three lists."""

    kind: Literal["cub"]


class SopData(Official):
    """Stanford Online Products: `Ebay_train.txt`, `Ebay_test.txt`."""

    kind: Literal["sop"]


class InShopData(Official):
    """In-Shop Clothes Retrieval: `img/`, `list_eval_partition.txt`."""

    kind: Literal["in_shop"]


class AircraftData(Official):
    """FGVC-Aircraft: `data/images/` and the lists in `data/`."""

    kind: Literal["aircraft"]


OfficialData = Cars196Data | CubData | SopData | InShopData | AircraftData
Data = Annotated[FolderData | CsvData | OfficialData | RenderedData, Field(discriminator="kind")]
