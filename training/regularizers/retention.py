"""Retention: what the network knew at its start is kept where no label speaks against it."""

from torch import Tensor


def retention(embeddings: Tensor, started: Tensor) -> Tensor:
    r"""Press the cosines of a batch to stay what they were at step 0.

    With unit embeddings x_i now and a_i by the network at step 0,

    .. math:: \frac{1}{B^2} \sum_{i, j} (\langle x_i, x_j \rangle - \langle a_i, a_j \rangle)^2

    A small shop shows few classes. What they do not need, other products may: without this term a
    training forgets it. Rotations of the embedding are free, since cosines alone are compared.

    Args:
        embeddings: (B, D), unit norm.
        started: (B, E), unit norm, of the same images.

    References:
        Park et al., Relational Knowledge Distillation (2019), section 3.2, here with cosines and
        squares. https://arxiv.org/abs/1904.05068
    """
    now, then = embeddings @ embeddings.T, started @ started.T
    loss: Tensor = (now - then).square().mean()
    return loss
