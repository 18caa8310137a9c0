# Runs the jobs, including training, of a service with the same state folder. The only image with torch.
# Build in the root of the project: docker build --file docker/training.Dockerfile .
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir --constraint constraints.txt uv
COPY pyproject.toml hatch_build.py README.md LICENSE ./
RUN python -m venv --without-pip /opt/kinlens \
    && uv pip install --python /opt/kinlens/bin/python --no-cache --link-mode copy --compile-bytecode \
    --constraint constraints.txt --requirements pyproject.toml --extra cpu --extra training --extra timm
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
    MPLCONFIGDIR=/tmp \
    TORCH_HOME=/state/cache/torch \
    HF_HOME=/state/cache/huggingface \
    XDG_CACHE_HOME=/state/cache \
    KINLENS_JOBS=elsewhere \
    KINLENS_STATE=/state
USER 10001:10001
WORKDIR /state
VOLUME ["/state"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, sqlite3; sqlite3.connect(f'file:{os.environ[\"KINLENS_STATE\"]}/service.sqlite?mode=ro', uri=True).execute('PRAGMA schema_version')"]
ENTRYPOINT ["kinlens-serve"]
CMD ["work"]
