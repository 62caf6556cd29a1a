#include "tensor_view.h"

namespace pdmesh::kernels::dlpack {
namespace {

constexpr std::uint32_t kMajorVersion = 1;

struct ExchangeApi {
  std::uint32_t major_version;
  std::uint32_t minor_version;
  ExchangeApi* previous;
  void* allocate_tensor;
  void* managed_from_object;
  void* managed_to_object;
  ViewObject view_object;
  void* current_stream;
};

ViewObject look_up(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  void* api = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_XDECREF(capsule);  // the type keeps it
  PyErr_Clear();
  const auto* exchange = static_cast<const ExchangeApi*>(api);
  return exchange == nullptr || exchange->major_version != kMajorVersion ? nullptr : exchange->view_object;
}

}  // namespace

// Called with the interpreter locked, like every conversion of arguments. Types are kept alive by being
// cached.
ViewObject find_view_function(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;
  static ViewObject known_function = nullptr;
  if (type != known_type) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    Py_XDECREF(reinterpret_cast<PyObject*>(known_type));
    known_function = look_up(type);
    known_type = type;
  }
  return known_function;
}

}  // namespace pdmesh::kernels::dlpack
