// Calls of kernels that another process asks for, made in an emulator of another processor: the kernels get the other
// process's addresses. A page is fetched from it when a kernel first touches the page, and what the kernel has changed is
// written back when it has ended.
//
// Messages on the pipes are 64-bit numbers. Read: the length of a name, the name, 8 floating-point numbers, the number of
// others, and these. Written: FETCH and an address (answered by 1 and a page, or 0), CHANGED, an address, a length and
// bytes, and ENDED.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

enum Message : int64_t { ENDED = 0, FETCH = 1, CHANGED = 2 };
constexpr uintptr_t PAGE = 4096;
constexpr size_t MOST_PAGES = 1 << 15;

struct Page {
    uintptr_t at;
    char* before;
};

Page pages[MOST_PAGES];
size_t count = 0;
std::atomic_flag busy = ATOMIC_FLAG_INIT;
int asks, answers;

[[noreturn]] void fail(const char* what) {
    dprintf(2, "%s\n", what);
    _exit(3);
}

void get(void* to, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t some = read(answers, static_cast<char*>(to) + done, size - done);
        if (some <= 0) _exit(done == 0 && some == 0 ? 0 : 2);
        done += static_cast<size_t>(some);
    }
}

void put(const void* from, size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t some = write(asks, static_cast<const char*>(from) + done, size - done);
        if (some <= 0) _exit(2);
        done += static_cast<size_t>(some);
    }
}

int64_t got() {
    int64_t number;
    get(&number, sizeof number);
    return number;
}

void put_numbers(std::initializer_list<int64_t> numbers) { put(numbers.begin(), numbers.size() * sizeof(int64_t)); }

void fetch(int, siginfo_t* told, void*) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(told->si_addr) & ~(PAGE - 1);
    while (busy.test_and_set()) {}
    bool known = false;
    for (size_t index = 0; index < count; ++index) known = known || pages[index].at == at;
    if (!known) {
        if (count == MOST_PAGES) fail("a kernel reads too many pages");
        put_numbers({FETCH, static_cast<int64_t>(at)});
        if (got() == 0) fail("a kernel reads or writes where nothing is");
        // No other thread sees the page before it is whole: until then its place is taken, and cannot be read.
        void* place = mmap(reinterpret_cast<void*>(at), PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
                           -1, 0);
        char* page = static_cast<char*>(mmap(nullptr, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (place != reinterpret_cast<void*>(at) || page == MAP_FAILED) fail("a page is taken");
        char* before = page + PAGE;
        get(before, PAGE);
        std::memcpy(page, before, PAGE);
        if (mremap(page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place) fail("a page is taken");
        pages[count++] = {at, before};
    }
    busy.clear();
}

void give_back() {
    for (size_t index = 0; index < count; ++index) {
        const char *page = reinterpret_cast<char*>(pages[index].at), *before = pages[index].before;
        for (size_t first = 0; first < PAGE; ++first) {
            if (page[first] == before[first]) continue;
            size_t end = first;
            while (end < PAGE && page[end] != before[end]) ++end;
            put_numbers({CHANGED, static_cast<int64_t>(pages[index].at + first), static_cast<int64_t>(end - first)});
            put(page + first, end - first);
            first = end;
        }
        munmap(reinterpret_cast<void*>(pages[index].at), PAGE);
        munmap(pages[index].before, PAGE);
    }
    count = 0;
}

// Of 64-bit ARM: eight numbers of each kind come in registers, and the others of 64 bits lie on the stack in order.
using Kernel = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float,
                        float, float, float, float, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

}  // namespace

// The C library's clears whole blocks of a cache by one instruction, which QEMU (7.2) does in part alone where a page has
// to be fetched in the middle.
extern "C" __attribute__((optimize("no-tree-loop-distribute-patterns"))) void* memset(void* to, int value, size_t size) {
    char* at = static_cast<char*>(to);
    for (size_t index = 0; index < size; ++index) at[index] = static_cast<char>(value);
    return to;
}

int main(int, char** arguments) {
    answers = std::atoi(arguments[1]);
    asks = std::atoi(arguments[2]);
    struct sigaction action = {};
    action.sa_sigaction = fetch;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
    for (;;) {
        std::string name(static_cast<size_t>(got()), ' ');
        get(&name[0], name.size());
        float f[8];
        get(f, sizeof f);
        int64_t n[16] = {};
        get(n, static_cast<size_t>(got()) * sizeof(int64_t));
        const Kernel kernel = reinterpret_cast<Kernel>(dlsym(RTLD_DEFAULT, name.c_str()));
        if (kernel == nullptr) fail(name.c_str());
        kernel(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], n[8], n[9],
               n[10], n[11], n[12], n[13], n[14], n[15]);
        give_back();
        put_numbers({ENDED});
    }
}
