"""Numbers that are known together: a joint normal law that measurements narrow down, which is a Kalman filter."""

from __future__ import annotations

import numpy as np

CLIP = 2.5  # standard deviations: a measurement that is further away counts as just so far


class Normal:
    """Mean and covariance of some numbers, which may be added and dropped.

    Attributes:
      mean_N: [N] float64.
      cov_NN: [N, N] float64.
      noise: variance of a measurement of weight 1, which is learnt from how far they are from what was expected.
    """

    def __init__(self, noise: float, least_noise: float, slowness: float):
        """Of no numbers.

        Args:
          noise: to begin with.
          least_noise: lower end of it.
          slowness: measurements over which it is averaged.
        """
        self.mean_N, self.cov_NN = np.zeros(0), np.zeros((0, 0))
        self.noise, self._least, self._slowness = noise, least_noise, slowness

    def add(self, mean_M: np.ndarray, cov_MM: np.ndarray, of_M: np.ndarray | None = None) -> int:
        """Adds numbers, and returns the place of the first.

        Args:
          mean_M: [M] of them, or by how much they differ from others.
          cov_MM: [M, M] of that.
          of_M: [M] places of those others; None for none.
        """
        first, new = len(self.mean_N), len(mean_M)
        if of_M is None:
            across_MN, own_MM = np.zeros((new, first)), np.zeros((new, new))
        else:
            across_MN, own_MM = self.cov_NN[of_M], self.cov_NN[np.ix_(of_M, of_M)]
            mean_M = mean_M + self.mean_N[of_M]
        self.cov_NN = np.block([[self.cov_NN, across_MN.T], [across_MN, own_MM + cov_MM]])
        self.mean_N = np.concatenate([self.mean_N, mean_M])
        return first

    def drop(self, first: int, count: int) -> None:
        """Forgets numbers; those behind them move up."""
        gone = slice(first, first + count)
        self.mean_N = np.delete(self.mean_N, gone)
        self.cov_NN = np.delete(np.delete(self.cov_NN, gone, axis=0), gone, axis=1)

    def fade(self, place: int, kept: float, spread: float) -> None:
        """Lets time pass: a number around zero keeps a share of itself, and gains that much of its usual variance."""
        self.mean_N[place] *= kept
        self.cov_NN[place] *= kept
        self.cov_NN[:, place] *= kept
        self.cov_NN[place, place] += spread * (1.0 - kept * kept)

    def blur(self, first: int, end: int | None, grown: float) -> None:
        """Lets time pass: numbers from one place to another become less sure by a variance."""
        np.einsum("ii->i", self.cov_NN)[first:end] += grown

    def measure(self, by_N: np.ndarray, surprise: float, weight: float = 1.0) -> None:
        """Takes note of a measurement.

        Args:
          by_N: [N] by how much what is measured grows with each number.
          surprise: how much more it is than was expected.
          weight: 1 for the usual noise, less for more of it.
        """
        cov_N = self.cov_NN @ by_N
        known, noise = float(by_N @ cov_N), self.noise / weight
        spread = known + noise
        most = CLIP * spread**0.5
        surprise = min(max(surprise, -most), most)
        if known < noise:
            more = weight * (surprise * surprise - spread) / self._slowness
            self.noise = max(self.noise + more, 0.5 * self.noise, self._least)
        gain_N = cov_N / spread
        self.mean_N += gain_N * surprise
        self.cov_NN -= np.outer(gain_N, cov_N)
