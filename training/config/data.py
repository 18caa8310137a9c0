"""The `data` table of a job: which images, and where."""

from typing import Annotated, Literal

from pydantic import Field

from training.config.section import Section


class FolderData(Section):
    """A folder with a sub-folder for each class; the classes are split into train and test."""

    kind: Literal["folder"]
    root: str
    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    small_classes: Literal["refuse", "drop"] = "refuse"


class CsvData(Section):
    """A CSV with the columns path, label and, optionally, split (train or test)."""

    kind: Literal["csv"]
    root: str
    file: str = "images.csv"
    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    small_classes: Literal["refuse", "drop"] = "refuse"


class Cars196Data(Section):
    """Cars196 in its official layout: `car_ims/` and `cars_annos.mat`."""

    kind: Literal["cars196"]
    root: str
    allow_partial: bool = False


class CubData(Section):
    """CUB-200-2011 in its official layout: `images/` and its three lists."""

    kind: Literal["cub"]
    root: str
    allow_partial: bool = False


class SopData(Section):
    """Stanford Online Products in its official layout: `Ebay_train.txt`, `Ebay_test.txt`."""

    kind: Literal["sop"]
    root: str
    allow_partial: bool = False


class InShopData(Section):
    """In-Shop Clothes Retrieval in its official layout: `img/`, `list_eval_partition.txt`."""

    kind: Literal["in_shop"]
    root: str
    allow_partial: bool = False


class AircraftData(Section):
    """FGVC-Aircraft in its official layout: `data/images/` and the lists in `data/`."""

    kind: Literal["aircraft"]
    root: str
    allow_partial: bool = False


class RenderedData(Section):
    """A catalogue of rendered products, drawn into `root` if it is not there yet."""

    kind: Literal["rendered"]
    root: str
    products: int = 90
    views: int = 16
    size_px: int = 160
    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    seed: int = 0


OfficialData = Cars196Data | CubData | SopData | InShopData | AircraftData
Data = Annotated[FolderData | CsvData | OfficialData | RenderedData, Field(discriminator="kind")]
