/* Replaces a function that one library calls: the replacement's address takes the place of the function's in the
 * linkage table of that library. Other libraries are not affected.
 *
 * Source: System V ABI, AMD64 supplement, "Procedure Linkage Table"; ELF specification, "Dynamic Section".
 */
#define _GNU_SOURCE
#include "linkage.h"

#include <elf.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
  const char *library, *function;
  void *replacement, **original;
  bool is_replaced;
} Wanted;

static bool write_slot(void **slot, void *value) {
  uintptr_t page_size = sysconf(_SC_PAGESIZE);
  void *page = (void *)((uintptr_t)slot & ~(page_size - 1));
  /* A library may be linked so that the linker's table is read-only once it is loaded. */
  if (mprotect(page, page_size, PROT_READ | PROT_WRITE) != 0) return false;
  atomic_store((_Atomic(void *) *)slot, value);
  return true;
}

static int replace(struct dl_phdr_info *library, size_t size, void *data) {
  (void)size;
  Wanted *wanted = data;
  if (strstr(library->dlpi_name, wanted->library) == NULL) return 0;
  const ElfW(Dyn) *dynamic = NULL;
  for (int i = 0; i < library->dlpi_phnum; i++)
    if (library->dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = (const ElfW(Dyn) *)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
  if (dynamic == NULL) return 1;
  const ElfW(Rela) *slots = NULL;
  const ElfW(Sym) *symbols = NULL;
  const char *names = NULL;
  size_t slots_size = 0;
  for (; dynamic->d_tag != DT_NULL; dynamic++) {
    /* glibc has already added the library's address to these pointers. */
    if (dynamic->d_tag == DT_JMPREL) slots = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_PLTRELSZ) slots_size = dynamic->d_un.d_val;
    if (dynamic->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_STRTAB) names = (const char *)dynamic->d_un.d_ptr;
  }
  if (slots == NULL || symbols == NULL || names == NULL) return 1;
  for (size_t i = 0; i < slots_size / sizeof *slots; i++) {
    if (strcmp(names + symbols[ELF64_R_SYM(slots[i].r_info)].st_name, wanted->function) != 0) continue;
    void **slot = (void **)(library->dlpi_addr + slots[i].r_offset);
    /* Store the original first: once the slot is written, another thread may call the replacement, which needs it. */
    *wanted->original = *slot;
    wanted->is_replaced = write_slot(slot, wanted->replacement);
  }
  return 1;
}

bool polyxla_replace(const char *library, const char *function, void *replacement, void **original) {
  Wanted wanted = {library, function, replacement, original, false};
  dl_iterate_phdr(replace, &wanted);
  return wanted.is_replaced;
}
