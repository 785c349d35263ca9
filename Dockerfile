# A container of the program with what headless rendering needs:
#   docker build -t vla-grpo .                                              # torch with CUDA; some 12 GB
#   docker build -t vla-grpo --build-arg TORCH_INDEX=URL .                  # for CPUs; URL of torch's CPU wheels
#   docker run --gpus all -v "$PWD/runs:/vla-grpo/runs" -v vla-grpo-cache:/root/.cache vla-grpo \
#       python train_grpo.py --task-id 0                                    # on a CPU: without --gpus all
FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=""
ARG ASSETS=official
WORKDIR /vla-grpo
# torch.compile needs the compiler for a 7B; git tells a run its commit.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
# What seldom changes comes first: the next build takes it from the cache.
COPY requirements*.txt ./
COPY scripts scripts
RUN scripts/system_packages.sh && rm -rf /var/lib/apt/lists/* \
    && PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="$TORCH_INDEX" ASSETS="$ASSETS" scripts/make_venv.sh
COPY . .
# The capability `graphics` brings the driver's EGL; NVIDIA's container toolkit leaves it out by default.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics PATH=/vla-grpo/.venv/bin:$PATH
CMD ["make", "demo"]
