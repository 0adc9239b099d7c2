// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bufio"
	"fmt"
	"os"
	"testing"
	"time"
)

// client is a rank's end.
func client(t *testing.T, s *pmi, rank int, kill func()) (*os.File, *bufio.Reader) {
	t.Helper()
	conn, _, err := s.connect(rank)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	go s.serve(rank, kill)
	return conn, bufio.NewReader(conn)
}

func TestPMI(t *testing.T) {
	s := newPMI(2)
	killed := make(chan struct{})
	a, fromA := client(t, s, 0, func() { t.Error("rank 0 is killed") })
	b, fromB := client(t, s, 1, func() { close(killed) })
	ask := func(conn *os.File, from *bufio.Reader, command, want string) {
		t.Helper()
		if command != "" {
			fmt.Fprintln(conn, command)
		}
		if got, err := from.ReadString('\n'); got != want+"\n" {
			t.Errorf("%s: %q, error %v, want %q", command, got, err, want)
		}
	}
	ask(a, fromA, "cmd=get kvsname=xspin key=PMI_process_mapping", "cmd=get_result rc=0 msg=success value=(vector,(0,2,1))")
	ask(a, fromA, "cmd=put kvsname=xspin key=k value=a b=c value=d", "cmd=put_result rc=0 msg=success")
	fmt.Fprintln(a, "cmd=barrier_in") // it waits for the other
	ask(b, fromB, "cmd=get kvsname=xspin key=k", "cmd=get_result rc=0 msg=success value=a b=c value=d")
	ask(b, fromB, "cmd=get kvsname=xspin key=none", "cmd=get_result rc=-1 msg=no_such_key value=unknown")
	ask(b, fromB, "cmd=barrier_in", "cmd=barrier_out")
	ask(a, fromA, "", "cmd=barrier_out")
	fmt.Fprintln(b, "cmd=abort exitcode=1")
	select {
	case <-killed:
	case <-time.After(10 * time.Second):
		t.Error("a rank that aborts is not killed")
	}
	ask(a, fromA, "cmd=finalize", "cmd=finalize_ack")
}
