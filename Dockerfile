# One image for every role: Ray node, draft, verify, router, ledger, model job, command line.
#
#   docker build -t paceline .                                    CPU
#   docker build -t paceline --build-arg TORCH_BACKEND=cu126 .    CUDA, see compose.gpu.yaml
#
# TORCH_BACKEND is uv's word for where PyTorch comes from (cpu, cu126, ...); empty: the index that pip would take.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG UV_VERSION=0.13.9
ARG TORCH_BACKEND=cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# A compiler for the kernels, here only. Its version is the base image's business.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
ENV UV_LINK_MODE=copy VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv && pip install --no-cache-dir "uv==${UV_VERSION}"

# Dependencies first: they change less often than the code. What is tested together stands in constraints.txt.
WORKDIR /opt/paceline
COPY pyproject.toml constraints.txt ./
RUN uv pip install --no-cache -c constraints.txt ${TORCH_BACKEND:+--torch-backend "${TORCH_BACKEND}"} -r pyproject.toml \
 && uv pip uninstall uv

COPY . .
RUN pip install --no-cache-dir --no-deps --editable . \
 && python deploy/prebuild.py /opt/paceline/native \
 && python -m compileall -q paceline draft_service verify_service router gates cluster deploy

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/paceline --shell /usr/sbin/nologin paceline \
 && install -d -o paceline -g paceline -m 0755 /var/lib/paceline \
 && install -d -o paceline -g paceline -m 0700 /run/paceline
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/paceline /opt/paceline
WORKDIR /opt/paceline
# Ray: no forks beside gRPC, no usage report, GPUs stay visible to a tier that reserves none (compose says who gets which).
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PACELINE_CACHE=/var/lib/paceline \
    PACELINE_PREBUILT=/opt/paceline/native \
    GRPC_ENABLE_FORK_SUPPORT=false \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
USER 10001:10001
VOLUME ["/var/lib/paceline"]
STOPSIGNAL SIGTERM
# PACELINE_HEALTH names the /healthz of what is run, several if need be.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "/opt/paceline/deploy/health.py"]
CMD ["paceline", "--help"]
