# syntax=docker/dockerfile:1.7
# Two images, by --target: `worker` (CUDA) and `gateway` (slim; also tasks, the command line and the SDK).
#
#   docker build --target worker  --tag inferq-worker:0.1.0  --build-arg VERSION=0.1.0 .
#   docker build --target gateway --tag inferq-gateway:0.1.0 --build-arg VERSION=0.1.0 .
ARG SLIM_IMAGE=python:3.12.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04

# The wheel: whatever is not in it is in no image.
FROM ${SLIM_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY inferq inferq
COPY protocol protocol
COPY producer producer
COPY worker worker
COPY kernels kernels
RUN pip install --no-cache-dir "setuptools==84.2.1" \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${SLIM_IMAGE} AS gateway-packages
COPY image-constraints.txt /constraints.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m venv /opt/inferq \
    && wheel="$(echo /wheels/*.whl)" \
    && /opt/inferq/bin/pip install --no-cache-dir --constraint /constraints.txt "inferq[gateway,tasks,s3,tracing,cli] @ file://${wheel}"

FROM ${CUDA_IMAGE} AS worker-packages
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
COPY image-constraints.txt /constraints.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3.12 -m venv /opt/inferq \
    && wheel="$(echo /wheels/*.whl)" \
    && /opt/inferq/bin/pip install --no-cache-dir --constraint /constraints.txt "inferq[worker,tracing] @ file://${wheel}"

FROM ${SLIM_IMAGE} AS gateway
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="inferq gateway" \
      org.opencontainers.image.description="OpenAI-shaped HTTP before the queue; also tasks, the command line and the SDK" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/inferq --shell /usr/sbin/nologin inferq
COPY --from=gateway-packages /opt/inferq /opt/inferq
ENV PATH=/opt/inferq/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    INFERQ_GATEWAY_HOST=0.0.0.0 \
    INFERQ_GATEWAY_PORT=8000
USER 10001:10001
WORKDIR /home/inferq
EXPOSE 8000
# It finds the port by itself: tasks, and flags, have others.
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-m", "inferq.healthcheck"]
ENTRYPOINT ["inferq"]
CMD ["gateway"]

FROM ${CUDA_IMAGE} AS worker
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="inferq worker" \
      org.opencontainers.image.description="Pulls jobs from the queue and generates tokens on a GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Triton compiles a launcher for each kernel when it first runs: that takes a C compiler and
# Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3.12-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home --home-dir /home/inferq --shell /usr/sbin/nologin inferq
COPY --from=worker-packages /opt/inferq /opt/inferq
ENV PATH=/opt/inferq/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    INFERQ_HEALTH_PORT=8081
USER 10001:10001
WORKDIR /home/inferq
EXPOSE 8081
# A model may take long to load: until then only liveness counts, which loading does not fail.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "inferq.healthcheck"]
ENTRYPOINT ["inferq"]
CMD ["worker"]
