// Collectives for ranks that share one GPU in tests: NCCL refuses two ranks on a device.
#include "host_collectives.hpp"

Tensor copy_to_host(const Tensor& tensor) {
  TORCH_CHECK(!tensor.is_cpu(), "tensors must be on the device, found ", tensor.device());
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "tensors must be contiguous");
  return tensor.detach().cpu().contiguous();  // waits for the kernels of the current stream
}

void copy_from_host(const Tensor& to, const Tensor& from) {
  at::NoGradGuard no_grad;
  to.variable_data().copy_(from.view_as(to));  // as NCCL does, without counting a new version for autograd
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<HostCollectives>("sharedgpu", std::move(gloo), &copy_to_host, &copy_from_host);
  });
}
