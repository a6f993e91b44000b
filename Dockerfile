# g2rpo for CUDA, at the versions of constraints.txt:
#   docker build -t g2rpo .
#   docker run --gpus all -v "$PWD/runs:/data/runs" -v "$HOME/.cache/huggingface:/home/g2rpo/.cache/huggingface" g2rpo train scenes
# PyPI's torch for Linux brings the CUDA libraries; the host needs the NVIDIA driver and container toolkit only.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* # torch.compile needs a compiler
RUN useradd --create-home g2rpo && mkdir -p /data && chown g2rpo /data
WORKDIR /opt/g2rpo
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[data,demo,ocr,quantized,video,wandb,trackio]'
USER g2rpo
WORKDIR /data
ENTRYPOINT ["g2rpo"]
CMD ["--help"]
