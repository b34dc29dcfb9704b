# The smallest guest that dirties memory: firmware that counts in every page of a range, for ever, and checks as it goes.
#
# Loaded with -bios on any machine type; no operating system, no device but the serial port.
#   0x00010000  status page: u32 passes finished, u32 pages found wrong, u32 first data page's number, u32 number of data pages
#   0x00100000  data: word 0 of each page holds the number of the pass that last wrote it
# Serial port: 'K' once it runs, '!' for every page that does not hold what the pass before wrote.

        .set    STATUS, 0x10000
        .set    DATA, 0x100000
        .ifndef PAGES
        .set    PAGES, 1024
        .endif
        .set    COM1, 0x3f8

        .text
        # The image's last 64 KiB also lie at 0xf0000, where the processor's real mode can reach them.
        .set    BASE, 0xf0000

        .code16
start:
        cli
        lgdtl   %cs:gdt_pointer - start
        movl    %cr0, %eax
        orl     $1, %eax
        movl    %eax, %cr0
        ljmpl   $8, $(BASE + protected - start)

        .code32
protected:
        movw    $16, %ax
        movw    %ax, %ds
        movw    %ax, %es
        movw    %ax, %ss
        movl    $0, STATUS
        movl    $0, STATUS + 4
        movl    $(DATA >> 12), STATUS + 8
        movl    $PAGES, STATUS + 12
        movw    $COM1, %dx
        movb    $'K', %al
        outb    %al, %dx
        # RAM starts as zeros, so the first pass finds "pass 0" everywhere.
        xorl    %ebx, %ebx              # ebx: what every page must hold
pass:
        leal    1(%ebx), %ecx           # ecx: what it holds next
        movl    $DATA, %edi
page:
        cmpl    %ebx, (%edi)
        jne     wrong
written:
        movl    %ecx, (%edi)
        addl    $4096, %edi
        cmpl    $(DATA + PAGES * 4096), %edi
        jb      page
        movl    %ecx, %ebx
        movl    %ebx, STATUS
        jmp     pass
wrong:
        incl    STATUS + 4
        movb    $'!', %al
        outb    %al, %dx
        jmp     written

        .balign 8
gdt:
        .quad   0                       # none
        .quad   0x00cf9b000000ffff      # 8: flat code
        .quad   0x00cf93000000ffff      # 16: flat data
gdt_pointer:
        .word   gdt_pointer - gdt - 1
        .long   BASE + gdt - start

        # Where the processor starts: 16 bytes below the image's end.
        .org    0xfff0
        .code16
        ljmpw   $(BASE >> 4), $0
        .org    0x10000
