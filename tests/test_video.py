"""Videos hold every frame, upright, in their colours, in real time."""

import imageio.v2 as imageio
import numpy as np

from rl.video import write_video


def test_every_frame_comes_back_at_20_per_second(tmp_path):
    frames = []
    for i in range(12):
        frame = np.zeros((256, 256, 3), dtype=np.uint8)
        frame[:128, :, 0] = 200  # upper half red
        frame[128:, : 20 * i, 2] = 200  # a blue bar that grows in the lower half
        frames.append(frame)
    path = tmp_path / "new" / "there.mp4"
    write_video(path, frames)
    with imageio.get_reader(path) as reader:
        read = np.stack([reader.get_data(i) for i in range(reader.count_frames())]).astype(float)
        assert reader.get_meta_data()["fps"] == 20
        assert reader.get_meta_data()["codec"] == "h264"
    assert read.shape == (12, 256, 256, 3)
    assert np.abs(read - np.stack(frames)).mean() < 6  # H.264 is lossy
