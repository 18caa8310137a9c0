"""R@1 of ten losses in the twelve CUB experiments of the paper: {network: {size: scores}}.

Psomas, Metric Learning: A Deep Dive (2020), "Results, Discussion"; the order of the scores is that
of LOSSES.
"""

LOSSES = (
    "Contrastive",
    "Triplet",
    "LiftedStructure",
    "NPair",
    "ProxyNCA",
    "Margin",
    "ArcFace",
    "MultiSimilarity",
    "SoftTriple",
    "ProxyAnchor",
)

RECALL_AT_1 = {
    "ResNet50": {
        64: (60.28, 57.56, 58.36, 57.28, 60.25, 59.66, 58.32, 60.84, 61.28, 62.93),
        128: (62.64, 60.48, 60.16, 58.91, 62.76, 63.00, 61.33, 63.96, 64.16, 66.71),
        512: (64.87, 63.52, 65.92, 61.36, 65.22, 64.99, 64.40, 68.69, 67.27, 69.48),
        1024: (66.51, 63.55, 66.34, 61.83, 65.12, 65.48, 65.82, 68.72, 67.42, 69.82),
    },
    "BNInception": {
        64: (58.88, 55.82, 58.29, 54.17, 56.98, 56.80, 55.77, 57.24, 58.07, 61.06),
        128: (61.24, 58.56, 61.60, 56.90, 60.15, 60.80, 59.94, 61.92, 63.44, 63.88),
        512: (63.28, 61.98, 64.28, 59.90, 63.84, 63.48, 62.36, 65.24, 66.76, 68.11),
        1024: (64.43, 62.45, 64.86, 60.76, 64.10, 64.08, 63.07, 66.22, 67.44, 68.47),
    },
    "GoogLeNet": {
        64: (56.36, 52.12, 55.18, 48.76, 51.01, 54.27, 52.92, 53.47, 55.00, 58.07),
        128: (57.73, 55.06, 58.07, 50.30, 55.77, 57.88, 56.94, 55.66, 57.00, 60.23),
        512: (61.01, 57.60, 60.89, 54.22, 57.46, 60.61, 61.60, 59.57, 60.90, 63.84),
        1024: (62.05, 58.54, 61.77, 55.40, 57.60, 59.55, 62.24, 61.16, 61.55, 64.47),
    },
}

RANKING = {
    "ProxyAnchor": (12, 1, 0),
    "SoftTriple": (38, 3.16, 1.19),
    "MultiSimilarity": (51, 4.25, 2.05),
    "Contrastive": (52, 4.33, 1.72),
    "LiftedStructure": (54, 4.5, 1.89),
    "Margin": (70, 5.83, 1.27),
    "ArcFace": (79, 6.58, 2.31),
    "ProxyNCA": (81, 6.75, 1.66),
    # The paper prints 8.85, two digits exchanged: 103 / 12 = 8.58.
    "Triplet": (103, 8.58, 0.51),
    "NPair": (120, 10, 0),
}
"""Total, average and standard deviation of the ranks, as printed, best first."""
