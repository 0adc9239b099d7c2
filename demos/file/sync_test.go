// SPDX-License-Identifier: Apache-2.0

package file

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// syncing is what a process does whose kernel refuses to put something on the disk.
type syncing struct {
	Dir  string
	Sync bool
	Deny string // "file", "directory", or nothing
	Size int
}

// run receives a message, and returns how publishing it has ended.
func (c syncing) run() (err error) {
	s, err := OpenStore(StoreConfig{Dir: c.Dir, MaxSize: 1 << 20, Sync: c.Sync, Ended: func(Received) {}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	in, err := s.begin(peer, 1)
	if err != nil {
		return err
	}
	defer s.end(in)
	if err := write(in, noise(c.Size, 1)); err != nil {
		return err
	}
	if c.Deny != "" {
		if err := denySync(int(s.dir.Fd()), c.Deny == "directory"); err != nil {
			return fmt.Errorf("deny: %w", err)
		}
	}
	err = in.publish(uint64(c.Size))
	in.fail(err) // nobody hashes it
	return err
}

// denySync has fsync fail with EIO from here on: of dir, or of all others.
func denySync(dir int, that bool) error {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	const number, firstArgument = 0, 16 // of seccomp_data, little-endian
	deny, pass := uint32(unix.SECCOMP_RET_ERRNO)|uint32(unix.EIO), uint32(unix.SECCOMP_RET_ALLOW)
	if !that {
		deny, pass = pass, deny
	}
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FSYNC, Jf: 4},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: firstArgument},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(dir), Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: deny},
		{Code: unix.BPF_RET | unix.BPF_K, K: pass},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	return nil
}

// With Sync a message is complete when file and directory are on the disk: what the
// kernel cannot put there fails it, and is not acknowledged. Without, nobody waits.
func TestSyncWaitsForTheDisk(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 100, 1 << 20} {
		for _, tc := range []struct {
			syncing
			fails bool
			files int
		}{
			{syncing{Sync: true}, false, 1},
			{syncing{Sync: true, Deny: "file"}, true, 0},
			{syncing{Sync: true, Deny: "directory"}, true, 1},
			{syncing{Deny: "file"}, false, 1},
			{syncing{Deny: "directory"}, false, 1},
		} {
			tc.Dir, tc.Size = t.TempDir(), size
			arg, err := json.Marshal(tc.syncing)
			if err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command(self, "_sync", string(arg)).CombinedOutput()
			if failed := err != nil; failed != tc.fails || failed && string(out) == "" {
				t.Errorf("%+v: %v, %s", tc.syncing, err, out)
			}
			if there := names(t, tc.Dir); len(there) != tc.files {
				t.Errorf("%+v: the directory has %v", tc.syncing, there)
			}
		}
	}
}
