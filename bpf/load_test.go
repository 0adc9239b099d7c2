// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

func TestTailHasTheReason(t *testing.T) {
	for _, tc := range []struct{ name, log, want string }{
		{"Linux 6.12", `0: R1=ctx() R10=fp0
0: (b7) r1 = 1
1: (b7) r2 = 1
2: (b7) r3 = 1
3: (b7) r4 = 1
4: (b7) r5 = 1
5: (b7) r6 = 1
6: (85) call bpf_xdp_load_bytes#189
; bpf_xdp_load_bytes(ctx, off, &word, 4); @ match.h:46
R4 invalid zero-sized read: u64=[0,3]
processed 7 insns (limit 1000000) max_states_per_insn 0`, `1: (b7) r2 = 1
2: (b7) r3 = 1
3: (b7) r4 = 1
4: (b7) r5 = 1
5: (b7) r6 = 1
6: (85) call bpf_xdp_load_bytes#189
; bpf_xdp_load_bytes(ctx, off, &word, 4); @ match.h:46
R4 invalid zero-sized read: u64=[0,3]`},
		{"Linux 7.3", `0: R1=ctx() R10=fp0
1: (61) r0 = *(u32 *)(r2 +100)
invalid access to packet, off=100 size=4, R2(id=0,off=100,r=0)

Verification failed: Memory Safety: Access outside bounds

Reason:
  The verifier cannot prove offset + access_size <= object_size.

At:
  insn 1

Causal path:
  insn 0

Suggestion:
  Add or adjust a bounds check.

processed 2 insns (limit 1000000)`, `Verification failed: Memory Safety: Access outside bounds
Reason:
  The verifier cannot prove offset + access_size <= object_size.
At:
  insn 1`},
		{"cut short, no statistics", "a\nb", "a\nb"},
		{"a heading and nothing else", "a\nVerification failed: x", "Verification failed: x"},
		{"statistics alone", "processed 0 insns", ""},
		{"nothing", "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := strings.Join(tail(strings.Split(tc.log, "\n")), "\n"); got != tc.want {
				t.Errorf("got\n%s\nwant\n%s", got, tc.want)
			}
		})
	}
}

// A program that reads behind the packet: its error names the kernel and has the
// verifier's reason, whichever verifier it is.
func TestRefusedProgram(t *testing.T) {
	needBPF(t)
	_, err := Load(&ebpf.CollectionSpec{Programs: map[string]*ebpf.ProgramSpec{"xspin_bad": {
		Name: "xspin_bad", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, 0, asm.Word),
			asm.LoadMem(asm.R0, asm.R2, 100, asm.Word),
			asm.Return(),
		},
	}}})
	var ve *VerifierError
	var cause *ebpf.VerifierError
	if !errors.As(err, &ve) || !errors.As(err, &cause) {
		t.Fatalf("%v is no VerifierError of both kinds", err)
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	if want := "Linux " + unix.ByteSliceToString(u.Release[:]); !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %q in it", err, want)
	}
	if !slices.ContainsFunc(ve.Tail, func(l string) bool { return strings.Contains(l, "outside") }) || !strings.Contains(err.Error(), ve.Tail[len(ve.Tail)-1]) {
		t.Errorf("%v; want the verifier's reason", err)
	}
	if strings.Contains(err.Error(), "processed") || strings.Contains(err.Error(), "Suggestion") {
		t.Errorf("%v; want the reason alone", err)
	}
}

// Every program of ours loads: the canary of a kernel. Handlers and their engine are in package
// loader, which links them.
func TestEveryProgramLoads(t *testing.T) {
	needBPF(t)
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){"ingress": LoadIngress, "ingress at tc": LoadIngressTC, "bench": LoadBench, "impair": LoadImpair} {
		spec, err := load()
		if err != nil {
			t.Fatal(err)
		}
		coll, err := Load(spec)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if len(coll.Programs) == 0 {
			t.Errorf("%s has no programs", name)
		}
		coll.Close()
	}
}

// needBPF skips the test without the right to load programs. With XSPIN_NO_SKIP=1
// it fails instead.
func needBPF(t *testing.T) {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	switch {
	case err == nil:
		m.Close()
	case os.Getenv("XSPIN_NO_SKIP") == "1":
		t.Fatalf("needs root: %v", err)
	default:
		t.Skipf("needs root: %v", err)
	}
}
