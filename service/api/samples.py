"""Sample queries of the page over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from embedder import errors
from service.api.sample_models import SampleModel, SamplesAnswer
from service.galleries.pictures import MAX_SAMPLES, Samples
from service.http.openapi import problems
from service.problems import INVALID, KINDS
from service.runtime import Runtime


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of sample queries."""
    router = APIRouter()
    samples = Samples(runtime.settings.samples)

    @router.get("/samples", responses=problems(), summary="List the sample queries")
    async def list_samples() -> SamplesAnswer:
        """Pictures to try a search with; none unless the operator chose a folder of them."""
        listed = [
            SampleModel(name=sample.name, image=f"/samples/{number}")
            for number, sample in enumerate(samples.all())
        ]
        return SamplesAnswer(samples=listed)

    @router.get(
        "/samples/{number}",
        response_class=Response,
        responses={
            200: {"content": {"image/*": {}}, "description": "The picture."},
            **problems(KINDS[errors.ItemNotFoundError], INVALID),
        },
        summary="A sample query",
    )
    def sample(number: Annotated[int, Path(ge=0, le=MAX_SAMPLES)]) -> Response:
        """The picture of a sample query."""
        media_type = samples.get(number).media_type
        return Response(samples.read(number), media_type=media_type)

    return router
