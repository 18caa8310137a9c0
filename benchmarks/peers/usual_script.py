"""The usual search service, as in tutorials: FastAPI, torch eager, faiss.IndexFlatIP.

A peer of `benchmarks/search.py`, which starts it.

    python benchmarks/peers/usual_script.py PORT BACKBONE VECTORS.npy THREADS
"""

import io
import sys

import faiss
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, File, Form, UploadFile
from PIL import Image
from torchvision import models, transforms

app = FastAPI()
network = models.get_model(sys.argv[2], weights=None, num_classes=128)
network.eval()
transform = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
)


@app.get("/ready")
def ready() -> dict[str, str]:
    return {"status": "ready"}


@app.post("/search")
def search(image: UploadFile = File(...), k: int = Form(20)) -> dict[str, object]:  # noqa: B008
    image_rgb = Image.open(io.BytesIO(image.file.read())).convert("RGB")
    with torch.no_grad():
        vector = network(transform(image_rgb).unsqueeze(0)).numpy()
    faiss.normalize_L2(vector)
    scores, numbers = app.state.index.search(vector, k)
    hits = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
    return {"hits": [{"id": number, "score": score} for number, score in hits]}


if __name__ == "__main__":
    vectors = np.load(sys.argv[3])
    torch.set_num_threads(int(sys.argv[4]))
    faiss.omp_set_num_threads(int(sys.argv[4]))
    app.state.index = faiss.IndexFlatIP(vectors.shape[1])
    app.state.index.add(vectors)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
