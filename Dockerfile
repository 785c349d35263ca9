# An image with the program and all that headless rendering needs. Build it, then run it:
#   docker build -t vla-grpo .                                              # torch with CUDA; about 12 GB
#   docker build -t vla-grpo --build-arg TORCH=cpu .                        # without CUDA
#   mkdir -p runs                                                           # else Docker makes it, as root's
#   docker run --gpus all --user "$(id -u):$(id -g)" -v "$PWD/runs:/vla-grpo/runs" -v vla-grpo-cache:/cache vla-grpo \
#       python train_grpo.py --task-id 0                                    # on a CPU: without --gpus all
FROM python:3.12-slim-bookworm
ARG TORCH=default
ARG ASSETS=official
WORKDIR /vla-grpo
# g++: torch.compile needs it for a 7B. git: a run records its commit, also where root owns the files. make: CMD uses it.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /vla-grpo
# Packages are installed before the program is copied, so a change of the program does not install them again.
COPY requirements*.txt requirements.lock ./
COPY scripts scripts
RUN scripts/system_packages.sh && rm -rf /var/lib/apt/lists/* \
    && PIP_NO_CACHE_DIR=1 TORCH="$TORCH" ASSETS="$ASSETS" scripts/make_venv.sh
COPY . .
# The requirements that were just copied may be newer than .venv/complete: without `touch`, make would install all again.
# Any user may write into runs and into /cache, the home of whoever runs the program.
RUN touch .venv/complete && mkdir -m 1777 runs /cache
# `graphics` gives the container the driver's EGL libraries, which NVIDIA's container toolkit leaves out by default.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics PATH=/vla-grpo/.venv/bin:$PATH HOME=/cache
USER 1000:1000
CMD ["make", "demo"]
