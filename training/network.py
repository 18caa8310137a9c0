"""From a checkpoint to its network."""

from training.checkpoint import Checkpoint
from training.config.job import Job, parse_job
from training.models.embedding import EmbeddingNet


def network_of(checkpoint: Checkpoint) -> tuple[Job, EmbeddingNet]:
    """The job and the trained network of a checkpoint, in evaluation mode on the CPU."""
    job = parse_job(checkpoint.job, origin="the job in the checkpoint")
    random_start = job.model.model_copy(update={"weights": "none"})
    net = EmbeddingNet(random_start, job.regularizers.determinant)
    net.load_state_dict(checkpoint.net)
    return job, net.eval()
