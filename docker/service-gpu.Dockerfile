# The search service for NVIDIA GPUs: ONNX Runtime and FAISS for CUDA 13, without torch, not as root.
# The wheels include CUDA; the host needs the driver and the NVIDIA Container Toolkit.
# Build in the root of the project: docker build --file docker/service-gpu.Dockerfile .
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir --constraint constraints.txt uv
COPY pyproject.toml hatch_build.py README.md LICENSE ./
RUN python -m venv --without-pip /opt/kinlens \
    && uv pip install --python /opt/kinlens/bin/python --no-cache --link-mode copy --compile-bytecode \
    --constraint constraints.txt \
    --requirements pyproject.toml --extra gpu --extra otel
COPY kinlens kinlens
COPY commands commands
COPY embedder embedder
COPY indexer indexer
COPY quality quality
COPY rendered rendered
COPY service service
COPY training training
RUN uv pip install --python /opt/kinlens/bin/python --no-cache --link-mode copy --compile-bytecode \
    --no-deps .

FROM python:${PYTHON}-slim
RUN groupadd --gid 10001 kinlens \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin kinlens \
    && install --directory --owner 10001 --group 10001 --mode 0750 /state
COPY --from=build /opt/kinlens /opt/kinlens
ENV PATH=/opt/kinlens/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    KINLENS_DEVICE=cuda \
    KINLENS_HOST=0.0.0.0 \
    KINLENS_PORT=8000 \
    KINLENS_STATE=/state
USER 10001:10001
WORKDIR /state
VOLUME ["/state"]
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=6s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"KINLENS_PORT\"]}/ready', timeout=5)"]
ENTRYPOINT ["kinlens-serve"]
