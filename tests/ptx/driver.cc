// A C interface to GPGPU-Sim: PTX is loaded, kernels are launched on memory of this process, for numbers or for cycles.
//
// Addresses of the simulated memory are the process's own: sim_arena() maps memory at GLOBAL_HEAP_START, below 4 GiB.

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <new>
#include <vector>

#include "../libcuda/gpgpu_context.h"
#include "cuda-sim/memory.h"
#include "cuda-sim/ptx_ir.h"
#include "cuda-sim/ptx_parser.h"
#include "gpgpu-sim/gpu-sim.h"
#include "gpgpu-sim/icnt_wrapper.h"
#include "gpgpu-sim/shader.h"
#include "gpgpusim_entrypoint.h"
#include "stream_manager.h"

// The simulator reads much that it has not set: new memory is zero.
void* operator new(size_t size) {
    void* at = calloc(1, size);
    if (!at) throw std::bad_alloc();
    return at;
}
void* operator new[](size_t size) { return operator new(size); }
extern "C" void* __wrap_malloc(size_t size) { return calloc(1, size); }

static gpgpu_context* the_context;
gpgpu_context* GPGPU_Context() {
    if (!the_context) the_context = new gpgpu_context();
    return the_context;
}
// What the CUDA runtime in front of the simulator would have.
void ptxinfo_data::ptxinfo_addinfo() {}
void register_ptx_function(const char*, function_info*) {}
_cuda_device_id* gpgpu_context::GPGPUSim_Init() { return the_gpgpusim->the_cude_device; }

static gpgpu_sim* gpu;
static std::vector<symbol_table*> tables;  // of each module
static const size_t kArena = 0x3f000000;

static void initialise(symbol* variable) {
    size_t bits;
    int kind, offset = 0;
    variable->type()->get_key().type_decode(bits, kind);
    for (auto& each : variable->get_initializer()) {
        ptx_reg_t value = each.get_literal_value();
        gpu->get_global_memory()->write(variable->get_address() + offset, bits / 8, &value, NULL, NULL);
        offset += bits / 8;
    }
}

static function_info* kernel_of(int module, const char* name) {
    symbol* found = tables[module]->lookup(name);
    return found ? found->get_pc() : nullptr;
}

static kernel_info_t* made(int module, const char* name, unsigned grid, unsigned block, int count, void** args,
                           const int* sizes) {
    function_info* function = kernel_of(module, name);
    dim3 blocks(grid, 1, 1), threads(block, 1, 1);
    auto* kernel = new kernel_info_t(blocks, threads, function, gpu->getNameArrayMapping(), gpu->getNameInfoMapping());
    size_t offset = 0;
    for (int i = 0; i < count; ++i) {
        const size_t align = sizes[i] % 8 == 0 ? 8 : sizes[i];
        offset = (offset + align - 1) / align * align;
        gpgpu_ptx_sim_arg arg(args[i], sizes[i], offset);
        function->add_param_data(i, &arg);
        offset += sizes[i];
    }
    function->finalize(kernel->get_param_memory());
    if (!function->is_pdom_set()) {
        function->do_pdom();
        function->set_pdom();
    }
    return kernel;
}

extern "C" {

// The memory that kernels work on, and its size; null where its addresses are taken.
void* sim_arena(size_t* size) {
    void* at = mmap((void*)GLOBAL_HEAP_START, kArena, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0);
    *size = kArena;
    return at == (void*)GLOBAL_HEAP_START ? at : nullptr;
}

// Reads gpgpusim.config in the current folder. Returns how many multiprocessors there are.
int sim_init() {
    gpgpu_context* context = GPGPU_Context();
    gpu = context->gpgpu_ptx_sim_init_perf();
    auto* properties = (cudaDeviceProp*)calloc(sizeof(cudaDeviceProp), 1);
    properties->major = gpu->compute_capability_major();
    properties->minor = gpu->compute_capability_minor();
    properties->warpSize = gpu->wrp_size();
    properties->multiProcessorCount = gpu->get_config().num_shader();
    gpu->set_prop(properties);
    context->the_gpgpusim->the_cude_device = new _cuda_device_id(gpu);
    context->the_gpgpusim->the_context = new CUctx_st(context->the_gpgpusim->the_cude_device);
    return properties->multiProcessorCount;
}

// Loads a file of PTX; returns the module's number.
int sim_load(const char* file) {
    gpgpu_context* context = GPGPU_Context();
    context->g_global_allfiles_symbol_table = NULL;  // names are the module's own
    symbol_table* table = context->gpgpu_ptx_sim_load_ptx_from_filename(file);
    for (auto g = table->global_iterator_begin(); g != table->global_iterator_end(); g++)
        if ((*g)->has_initializer()) initialise(*g);
    for (auto g = table->const_iterator_begin(); g != table->const_iterator_end(); g++)
        if ((*g)->is_const() && (*g)->has_initializer()) initialise(*g);
    tables.push_back(table);
    return tables.size() - 1;
}

// Tells the simulator what a kernel takes, which PTX does not say. Returns 0 where there is such a kernel.
int sim_takes(int module, const char* name, int registers, int shared) {
    function_info* function = kernel_of(module, name);
    if (!function) return 1;
    gpgpu_ptx_sim_info info = {};
    info.regs = registers, info.smem = shared, info.sm_target = 70, info.ptx_version = 63;
    function->set_kernel_info(info);
    return 0;
}

// Launches a kernel in the timing model. Returns its cycles, or -1 after so many.
long long sim_launch(int module, const char* name, unsigned grid, unsigned block, int count, void** args,
                     const int* sizes, int stats, long long most) {
    kernel_info_t* kernel = made(module, name, grid, block, count, args, sizes);
    gpu->launch(kernel);
    gpu->init();
    while (gpu->active()) {
        gpu->cycle();
        gpu->deadlock_check();
        if (most && (long long)gpu->gpu_sim_cycle > most) return -1;
    }
    const long long cycles = gpu->gpu_sim_cycle;
    if (stats) gpu->print_stats();
    gpu->update_stats();
    gpu->finished_kernel();
    fflush(stdout);
    return cycles;
}

// Runs a kernel for its numbers alone, block after block.
void sim_run(int module, const char* name, unsigned grid, unsigned block, int count, void** args, const int* sizes) {
    kernel_info_t* kernel = made(module, name, grid, block, count, args, sizes);
    gpu->functional_launch(kernel);
    GPGPU_Context()->func_sim->gpgpu_cuda_ptx_sim_main_func(*kernel, true);
    gpu->finish_functional_sim(kernel);
    fflush(stdout);
}
}
