import java.net.URI;
import java.net.http.*;
import java.time.Duration;

public class Get {
    public static void main(String[] args) throws Exception {
        String[] header = (args.length > 1 ? args[1] : "Accept: */*").split(": ", 2);
        var request = HttpRequest.newBuilder(URI.create(args[0])).timeout(Duration.ofSeconds(60)).header(header[0], header[1]).build();
        var answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
        if (answer.statusCode() != 200) throw new Exception("status " + answer.statusCode());
        System.out.print(answer.body());
    }
}
