"""From a job or a checkpoint to its network."""

from training.bundle_weights import bundle_of, start_from_bundle
from training.checkpoint import Checkpoint
from training.config.job import Job, parse_job
from training.models.embedding import EmbeddingNet


def new_network(job: Job) -> EmbeddingNet:
    """The network that a run of `job` begins with: of published weights, a file or a bundle.

    Raises: CheckpointError, BundleError, JobError.
    """
    bundle = bundle_of(job.model.weights)
    if bundle is not None:
        return start_from_bundle(job, bundle)
    return EmbeddingNet(job.model, job.regularizers.determinant)


def network_of(checkpoint: Checkpoint) -> tuple[Job, EmbeddingNet]:
    """The job and the trained network of a checkpoint, in evaluation mode on the CPU."""
    job = parse_job(checkpoint.job, origin="the job in the checkpoint")
    random_start = job.model.model_copy(update={"weights": "none"})
    net = EmbeddingNet(random_start, job.regularizers.determinant)
    net.load_state_dict(checkpoint.net)
    return job, net.eval()
