"""Local SGD and DiLoCo: logical workers make local steps, and parameters are averaged every H steps."""
